"""One answer of a conversation in the making. Knows nothing of time or of who prints."""

from __future__ import annotations

from collections.abc import Iterator

from kvgen.engine.answer import Answer, Ending
from kvgen.engine.decoder import Decoder


class Reply:
    """A decoder's steps until the model ends, a stop string or the limit."""

    def __init__(self, decoder: Decoder, answer: Answer) -> None:
        """``answer`` follows the new ids of ``decoder``."""
        self._decoder, self._answer = decoder, answer

    @property
    def text(self) -> str:
        """What was said so far."""
        return self._answer.text

    @property
    def new_ids(self) -> list[int]:
        """Every id chosen so far, the one that ended the answer included."""
        return self._answer.ids

    @property
    def ids(self) -> list[int]:
        """The answer's own ids, as they were generated."""
        return self.new_ids[:-1] if self.ending == "end" else self.new_ids

    @property
    def ending(self) -> Ending | None:
        """Why it has ended; ``None`` while it goes on, and for one that was left off."""
        return self._answer.reason

    @property
    def forwarded(self) -> list[int]:
        """Every id that the cache holds by now, of prompt and answer."""
        cache = self._decoder.cache
        return self._decoder.ids[: cache.position if cache else 0]

    def prefill(self) -> Iterator[int]:
        """As the decoder's: the prompt but for its last piece, stoppable between pieces."""
        return self._decoder.prefill()

    def step(self) -> str:
        """One more token; the text that may now be shown. ``ending`` is set if it was the last."""
        shown = len(self.text)
        self._answer.push(self._decoder.step().id)
        return self.text[shown:]

    def leave_off(self) -> str:
        """End it where it stands; the last text that may be shown."""
        shown = len(self.text)
        self._answer.close()
        return self.text[shown:]
