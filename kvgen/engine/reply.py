"""One answer in the making: steps of a decoder until the model ends, a stop string or the limit.

Knows the decoder, text and stop rules, nothing of time or of who prints.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Literal

from kvgen.engine.decoder import Decoder
from kvgen.engine.text import IncrementalText, StopStrings, Tokenizer

Ending = Literal["end", "stop", "length", "interrupted"]


class Reply:
    """An answer that grows by ``step``; its ``text`` is what may be shown."""

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer,
        stop_ids: Collection[int],
        stops: Sequence[str],
        at_most: int,
    ) -> None:
        """``at_most`` new tokens; ``stop_ids`` end the answer and are no part of it."""
        self._decoder = decoder
        self._stop_ids = stop_ids
        self._at_most = at_most
        self._pieces = IncrementalText(tokenizer, decoder.ids)
        self._stops = StopStrings(stops)
        self._prompt_tokens = len(decoder.ids)
        self.text = ""
        self.ending: Ending | None = None

    @property
    def new_ids(self) -> list[int]:
        """Every id chosen so far, the one that ended the answer included."""
        return self._decoder.ids[self._prompt_tokens :]

    @property
    def ids(self) -> list[int]:
        """The answer's own ids, as they were generated."""
        ids = self.new_ids
        return ids[:-1] if self.ending == "end" else ids

    @property
    def forwarded(self) -> list[int]:
        """Every id that the cache holds by now, prompt and answer."""
        cache = self._decoder.cache
        return self._decoder.ids[: cache.position if cache else 0]

    def prefill(self) -> Iterator[int]:
        """As the decoder's: the prompt but for its last piece, stoppable between pieces."""
        return self._decoder.prefill()

    def step(self) -> str:
        """One more token; the text it frees. ``ending`` is set when it was the last."""
        token = self._decoder.step()
        if token.id in self._stop_ids:
            self.ending = "end"
            return self._rest()
        piece = self._shown(self._pieces.push(token.id))
        if self.ending is None and len(self.new_ids) == self._at_most:
            self.ending = "length"
            piece += self._rest()
        return piece

    def interrupt(self) -> str:
        """End it where it stands; the last text that may be shown."""
        self.ending = "interrupted"
        return self._rest()

    def _rest(self) -> str:
        """What was held back as part of a character or of a stop string."""
        rest = self._shown(self._pieces.flush())
        if self._stops.found is None:
            held = self._stops.flush()
            self.text += held
            rest += held
        return rest

    def _shown(self, text: str) -> str:
        piece = self._stops.push(text)
        if self._stops.found is not None:
            self.ending = "stop"
        self.text += piece
        return piece
