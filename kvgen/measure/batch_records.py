"""What a batch leaves behind: plain data. Seconds are ``*_s``, bytes are ``*_bytes``."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvgen.cache.reuse import Receipt
from kvgen.engine.answer import Ending
from kvgen.measure.records import Environment, ModelFacts
from kvgen.measure.requests import Id


@dataclass
class Timing:
    """When one row ran, and what it took."""

    waited_s: float
    """From the start of the batch to the start of this prompt's prefill."""
    ttft_s: float
    """From there to its first token."""
    tpot_s: float | None
    """Mean time per token after the first, other rows' prefills included; absent below two."""
    share_s: float
    """Its own prefill, and its part of every step that it shared with other rows."""


@dataclass
class RowResult:
    """One finished prompt. All but ``receipt`` and ``timing`` is the same in every run."""

    id: Id
    request: str
    """A digest of the prompt's ids and of every setting that the new ids depend on."""
    input: str
    """A digest of the line that asked for it."""
    prompt_tokens: int
    max_new_tokens: int
    seed: int | None
    """Of this row's own generator; absent where nothing is drawn."""
    text: str
    new_ids: list[int]
    finish_reason: Ending
    stop_string: str | None
    receipt: Receipt
    """What became of the prompt's tokens, which depends on the prompts before it."""
    timing: Timing


@dataclass
class BatchSummary:
    """Sums over the rows that this run finished."""

    model: ModelFacts
    environment: Environment
    batch_size: int
    """Rows that are decoded together, at most."""
    shared: bool
    """Whether prefixes that prompts have in common are forwarded once."""
    prompts: int = 0
    """Finished in this run."""
    already_finished: int = 0
    """Taken from an earlier run."""
    rejected: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    computed_tokens: int = 0
    new_tokens: int = 0
    saved_s: float = 0.0
    wall_s: float = 0.0
    """From the first prefill to the last row's end."""
    kv_bytes_peak: int = 0
    """Buffers of the rows in flight and of the stored prefixes together, at most. Bytes."""
    notes: list[str] = field(default_factory=list)
    """What a reader must know to read the numbers right."""

    @property
    def tokens_per_s(self) -> float | None:
        """New tokens of all rows over the whole time."""
        return self.new_tokens / self.wall_s if self.wall_s else None
