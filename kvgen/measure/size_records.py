"""What ``kvgen size`` leaves behind: plain data. Bytes are ``*_bytes``."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class LayerGroup:
    """Layers that store the same, and what one more token adds to all of them together."""

    kind: str
    layers: int
    num_key_value_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    bytes_per_token: int
    """Growth before the window, if there is one, is full; an average where tokens are stored in
    blocks."""
    fixed_bytes: int | None
    """Per sequence, whatever its length: recurrent and convolution states."""
    formula: str


@dataclass
class SizeRow:
    """One cell of the table."""

    context: int
    batch: int
    kv_dtype: str
    kv_bytes: int
    largest_batch: int | None = None
    """What fits the budget beside the weights at this context."""


@dataclass
class Fit:
    """What fits into a budget for one cache dtype, one sequence."""

    kv_dtype: str
    longest_context: int
    limited_by: str
    """``memory``, or ``model`` where the model's own limit comes first."""
    kv_bytes: int
    working_bytes: int


@dataclass
class Alternative:
    """How another engine, or another form, stores the same model."""

    name: str
    bytes_per_token: int
    stored_here: bool


@dataclass
class Size:
    """The whole answer of ``kvgen size``."""

    model: str
    model_type: str
    dtype: str
    cache: str
    """The storage policy."""
    context_limit: int | None
    weight_bytes: int | None
    weight_source: str
    groups: list[LayerGroup]
    kv_dtype: str
    """The cache dtype of these figures: the first one asked for."""
    bytes_per_token: int
    """Of one sequence, before any window is full."""
    bytes_per_token_later: int
    """After all windows are full."""
    fixed_bytes: int
    rows: list[SizeRow] = field(default_factory=list)
    budget_bytes: int | None = None
    prefill_chunk: int | None = None
    """Tokens of a prompt that are forwarded together; the working memory depends on it."""
    fits: list[Fit] = field(default_factory=list)
    alternatives: list[Alternative] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ranks: int = 1
    """Over which the heads are shared out; all figures are those of one rank."""
