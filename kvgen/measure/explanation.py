"""What ``kvgen explain`` finds: plain data, no torch. Every number is measured, counted on a real
forward or read from a real tensor. Seconds are ``*_s``, bytes ``*_bytes``; shapes are lists.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kvgen.measure.records import Environment, ModelFacts

Cell = Literal["computed", "read", "recomputed", "evicted", "state", "none", "ahead"]


@dataclass
class TextToken:
    """A token of the sequence."""

    position: int
    """Absolute, counting from 0."""
    id: int
    """In the vocabulary."""
    token: str
    """By itself, special ones by name."""
    generated: bool
    """Chosen by the model; false for the prompt's."""


@dataclass
class LayerFacts:
    """What one cache layer keeps, from its spec."""

    index: int
    """Counting from 0."""
    kind: str
    """As the model's configuration names it."""
    keeps: str
    """What stays between steps, in words."""
    window: int | None
    """Keys a query reads at most, its own included; null without a window."""
    num_key_value_heads: int
    """Heads that pairs are stored for; 0 where none are."""
    bytes_per_token: int
    """Growth per token before any window is full, pairs only. Bytes."""


@dataclass
class Stored:
    """One tensor that a layer holds."""

    name: str
    """keys, values, state, index or pool."""
    shape: list[int]
    """Of what is held, without unused slots."""


@dataclass
class LayerState:
    """One layer after a stage, and the proof about what was there before it."""

    index: int
    """The layer."""
    stored: list[Stored]
    """The tensors it holds."""
    first_position: int | None
    """The oldest position whose pair is held; null where no pairs are kept."""
    end_position: int | None
    """One past the newest position whose pair is held; null where no pairs are kept."""
    slots: int
    """Slots allocated for pairs per sequence."""
    bytes_used: int
    """Bytes that a later query can still read."""
    bytes_allocated: int
    """Bytes of all storage the layer owns."""
    earlier: int
    """Pairs held both before and after the stage, which the checksums are over."""
    sha256_before: str | None
    """Of the bytes of these pairs, or of the state, before the stage; null where nothing was."""
    sha256_after: str | None
    """Of the same pairs, or of the state, after it."""
    unchanged: bool | None
    """Whether the earlier pairs are the same to the bit; null for states, which are replaced."""


@dataclass
class Attention:
    """What one layer's attention was called with, from the tensors themselves."""

    layer: int
    """The layer."""
    query_shape: list[int] | None
    """Of the queries, which nothing stores; null where the layer's arithmetic shows none."""
    key_shape: list[int] | None
    """Of the keys made from the tokens fed, as handed to the cache; null where none are."""
    value_shape: list[int] | None
    """Of the values made from the tokens fed."""
    keys_read: int | None
    """Keys the newest query may read, its own included; null where it reads none."""
    stored_read: int | None
    """Of these, the ones stored by earlier stages."""


@dataclass
class Choice:
    """A candidate for the next token."""

    id: int
    """In the vocabulary."""
    token: str
    """By itself."""
    logit: float
    """As the model gave it."""
    probability: float
    """After softmax over the vocabulary."""


@dataclass
class Twin:
    """The same prediction without a cache: the whole prefix forwarded from nothing."""

    input_shape: list[int]
    """Of the ids that entered the model."""
    tokens: int
    """Tokens forwarded."""
    repeated: int
    """Of these, the ones that an earlier stage had forwarded already."""
    repeated_so_far: int
    """Repeated tokens of all stages up to this one."""
    max_abs_logit_difference: float
    """Between its logits and the cached ones."""
    same_token: bool
    """Both give the same most likely token."""
    cells: list[Cell]
    """Its row of the grid, one cell per position."""
    operations: int
    """Multiplications and additions of the forward, counted as it ran."""
    attention_operations: int
    """Of these, those of torch's attention; 0 where a model multiplies queries and keys itself."""
    latency_s: float | None
    """Median of several runs; null without timings."""


@dataclass
class Stage:
    """One forward through the cache: prefill first, then one per decode step."""

    index: int
    """0 for prefill."""
    first_position: int
    """Absolute position of the first token fed."""
    tokens: int
    """Tokens fed."""
    input_shape: list[int]
    """Of the ids that entered the model."""
    attention: Attention
    """One layer's attention."""
    layers: list[LayerState]
    """Every layer afterwards."""
    kv_bytes_before: int
    """Used before the stage, over all layers."""
    kv_bytes_used: int
    """Used after it."""
    kv_bytes_allocated: int
    """Allocated after it."""
    choices: list[Choice]
    """The likeliest next tokens, best first."""
    chosen: Choice
    """The one that was taken."""
    cells: list[Cell]
    """Its row of the grid for the layer of ``attention``, one cell per position."""
    operations: int
    """Multiplications and additions of the forward, counted as it ran. Prefill's include logits
    at every position of the prompt, which only this walk needs."""
    attention_operations: int
    """Of these, those of torch's attention; 0 where a model multiplies queries and keys itself."""
    latency_s: float | None
    """Median of several runs; null without timings."""
    twin: Twin
    """The same without a cache."""


@dataclass
class Work:
    """Tokens that went through the model over the whole run, counted at its embedding."""

    cached: int
    """With the cache: each token once."""
    uncached: int
    """Without: the growing prefix at every stage."""
    repeated: int
    """The difference, computed before and thrown away."""


@dataclass
class Boundary:
    """What the cache saves at the last stage, what it cannot save, and this machine's limits."""

    tokens: int
    """Prefix length at the last stage."""
    cached_operations: int
    """Counted on the cached step."""
    uncached_operations: int
    """Counted on the forward over the whole prefix."""
    saved_operations: int
    """The difference: projections and states of earlier tokens."""
    remaining_attention_operations: int
    """The newest query over every retained key, which no cache saves."""
    weight_bytes_read: int
    """Weights that one step must read."""
    kv_bytes_read: int
    """Pairs and states that the last step read beside the weights."""
    kv_bytes_per_token: int
    """Growth of that read per token of context, before any window is full."""
    bandwidth_bytes_per_s: float | None
    """Large reads on this machine, measured."""
    operations_per_s: float | None
    """A large matrix product on this machine, measured. Null without timings."""
    step_limit_s: float | None
    """No cached step can be faster: bytes over bandwidth or operations over their rate."""
    uncached_limit_s: float | None
    """No uncached forward over the same prefix can be faster."""
    compute_bound_from: float | None
    """Prefix length up to which an uncached forward, too, waits for the weights only."""
    kv_equals_weights_at: int | None
    """Context at which a step reads as many bytes of cache as of weights; null for never."""


@dataclass
class Training:
    """One masked forward over the finished sequence, held against the cached stages."""

    positions: int
    """Positions compared."""
    max_abs_logit_difference: float
    """Over all of them."""
    agrees: bool
    """Whether that is within the tolerance."""


@dataclass
class CurvePoint:
    """The cost of one more token after so many."""

    tokens: int
    """Tokens of the prefix, the newest included."""
    cached_s: float
    """Forwarding the newest alone; median. For prefill, all of them."""
    uncached_s: float
    """Forwarding all of them; median."""
    max_abs_logit_difference: float
    """Between the two."""
    source: Literal["stage", "sweep"]
    """stage: one of the stages above. sweep: further along, over the same ids repeated."""


@dataclass
class Explanation:
    """One run of ``kvgen explain``."""

    model: ModelFacts
    """The model and the numbers behind its cache."""
    environment: Environment
    """Where and with what it ran."""
    prompt: str
    """As given, before any chat template."""
    prompt_tokens: int
    """Tokens of the prompt."""
    layer: int
    """The layer that ``attention`` and ``cells`` show."""
    tolerance: float
    """Largest logit difference that counts as the same in this dtype."""
    tokens: list[TextToken] = field(default_factory=list)
    """The finished sequence; the last one was chosen and never fed."""
    layers: list[LayerFacts] = field(default_factory=list)
    """Every cache layer of the model."""
    stages: list[Stage] = field(default_factory=list)
    """Prefill, then the decode steps."""
    work: Work = field(default_factory=lambda: Work(0, 0, 0))
    """Token passes of both paths."""
    boundary: Boundary | None = None
    """What is saved and what remains; null when the text ended at once."""
    training: Training | None = None
    """The parallel forward of training."""
    curve: list[CurvePoint] = field(default_factory=list)
    """Measured costs by prefix length; empty without timings."""
    notes: list[str] = field(default_factory=list)
    """What a reader must know to read the numbers right."""

    @property
    def changed(self) -> list[tuple[int, int]]:
        """Stage and layer of every earlier pair that did not stay the same."""
        every = ((stage, layer) for stage in self.stages for layer in stage.layers)
        return [(stage.index, layer.index) for stage, layer in every if layer.unchanged is False]

    @property
    def disagreeing(self) -> list[int]:
        """Stages whose logits differ from their twin's by more than the tolerance."""
        found = [(stage.index, stage.twin.max_abs_logit_difference) for stage in self.stages]
        return [index for index, difference in found if not difference <= self.tolerance]
