"""The text of one sequence as its ids come, and where it ends."""

from __future__ import annotations

from typing import Literal

from kvgen.engine.text import IncrementalText, StopStrings, Tokenizer

Ending = Literal["length", "end", "stop"]


class Answer:
    """Follows the new ids of one prompt until they end: by number, end-of-text or stop string."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: list[int],
        most: int,
        ends: frozenset[int],
        stops: tuple[str, ...],
    ) -> None:
        """At most ``most`` ids come; any of ``ends`` is the last."""
        self._pieces = IncrementalText(tokenizer, prompt_ids)
        self._stops = StopStrings(stops)
        self._most, self._ends = most, ends
        self.ids: list[int] = []
        self.text = ""
        """What may be shown: nothing of a stop string, or of what may become one."""
        self.piece = ""
        """What the last id completed, whatever stop strings hold back of it."""
        self.reason: Ending | None = None
        """Why it has ended; ``None`` while it goes on."""

    @property
    def stop_string(self) -> str | None:
        """The one it was ended by."""
        return self._stops.found

    def push(self, token_id: int) -> bool:
        """Take one id; whether it is the last."""
        self.ids.append(token_id)
        self.piece = self._pieces.push(token_id)
        self.text += self._stops.push(self.piece)
        if self._stops.found is not None:
            self.reason = "stop"
        elif token_id in self._ends:
            self.reason = "end"
            self.close()
        elif len(self.ids) == self._most:
            self.reason = "length"
            self.close()
        return self.reason is not None

    def close(self) -> None:
        """No more ids will come: what was held back as a possible stop string or part of a
        character is text after all.
        """
        self.text += self._stops.push(self._pieces.flush())
        if self._stops.found is None:
            self.text += self._stops.flush()
        else:
            self.reason = "stop"
