"""What a comparison leaves behind: plain data, no torch. Seconds are ``*_s``, bytes ``*_bytes``.

Raw samples stay in the record; everything else in it is computed from them, and nothing is rounded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kvgen.measure.records import Compilation, Environment, ModelFacts, RankShares, Verdict
from kvgen.measure.stats import Line, Ratio, Summary

Kind = Literal["cache", "no-cache", "transformers", "transformers-static", "generate"]
PromptSource = Literal["given", "built-in", "tokens"]


@dataclass
class ContestantFacts:
    """One way of computing the same tokens."""

    name: str
    """Unique within the comparison; the first contestant is the reference."""
    description: str
    """In words, for people."""
    kind: Kind
    """How it runs."""
    dtype: str
    """Arithmetic of weights and cache."""
    weight_bytes: int
    """All its weights and buffers, shared ones once. Bytes."""
    compilation: Compilation | None = None
    """Null where its step is not compiled."""


@dataclass
class StepCommunication:
    """What one step exchanged with the other ranks."""

    seconds: float
    """Within collectives, the wait for a slower rank included. Seconds."""
    collectives: int
    wire_bytes: int
    """What this rank sent, as a ring sends it. Bytes."""


@dataclass
class Run:
    """One contestant's pass over the tokens of one depth: the raw samples."""

    order: int
    """Place among all runs of the comparison, counting from 0."""
    depth: int
    contestant: str
    repetition: int
    """Counting from 0."""
    latencies_s: list[float]
    """Seconds per new token; the first is the prefill."""
    total_s: float
    """Sum of the latencies. Seconds."""
    forwarded_tokens: list[int]
    """Tokens sent through the model, per new token."""
    kv_bytes_used: int
    """Pairs held at the end. Bytes."""
    kv_bytes_allocated: int
    """Storage owned at the end. Bytes."""
    communication: list[StepCommunication] | None = None
    """Per new token, between ranks; null without ranks, and where steps cannot be told apart."""


@dataclass
class FirstDifference:
    """The first step at which a contestant would have chosen another token."""

    index: int
    """The step, counting from 0."""
    position: int
    """Absolute position of the token, counting from 0."""
    reference_id: int
    """What the reference finds likeliest."""
    contestant_id: int
    """What the contestant finds likeliest."""
    margin: float
    """The reference's logit of its likeliest token minus that of its second."""
    abs_logit_difference: float
    """Largest |difference| of the two at this step."""


@dataclass
class Agreement:
    """All logits of a contestant held against the reference's, over every step and repetition."""

    verdict: Verdict
    """exact: same tokens, logits within tolerance. tolerance: a near tie fell otherwise. lossy: a
    storage policy changed predictions, as far as it says it may."""
    tolerance: float
    """Largest |difference| that counts as the same in this dtype."""
    max_abs_logit_difference: float
    mean_abs_logit_difference: float
    mean_probability_drop: float
    """How much less probable than the reference the contestant finds the reference's likeliest
    tokens, on average."""
    compared_steps: int
    first_difference: FirstDifference | None


@dataclass
class Communication:
    """What went to communication between ranks, over all decode steps and repetitions."""

    step_s: float
    """Median time within collectives per step. Seconds."""
    share: float
    """Of the time of these steps."""
    collectives: int
    """Of the last step."""
    wire_bytes: int
    """What one rank sent in the last step, as a ring sends it. Bytes."""


@dataclass
class Result:
    """One contestant at one depth."""

    contestant: str
    prefill_s: Summary | None
    """The prompt forwarded after what is retained, and the first token's logits. Seconds."""
    ttft_s: Summary | None
    """Tokenize and prefill. Seconds."""
    tpot_s: Summary | None
    """Mean time per token after the first, over the repetitions. Seconds."""
    tokens_per_s: float | None
    """1 / median TPOT."""
    step_s: list[float]
    """Median over the repetitions, per new token. Seconds."""
    step_p95_s: float | None
    """95th percentile of all steps after the first, all repetitions. Seconds."""
    kv_bytes_peak: int
    """Most bytes of pairs held. Bytes."""
    kv_bytes_allocated: int
    """Most storage owned. Bytes."""
    forwarded_tokens: int
    """Tokens sent through the model in one repetition."""
    reprocessed_tokens: int
    """Of these, how many had been through it before."""
    bytes_read: int | None
    """What the last step had to read at least: weights and pairs held. Bytes."""
    bandwidth_share: float | None
    """bytes_read over the last step's median, as a part of the measured bandwidth."""
    agreement: Agreement | None
    """Null for the reference itself."""
    speedup: Ratio | None
    """Its TPOT over the reference's; null for the reference and where the verdict is broken."""
    prefill_speedup: Ratio | None
    """The same for the prefill."""
    break_even_position: int | None
    """Position from which the reference had cost less in total; null if that was not reached."""
    communication: Communication | None = None
    """Null without ranks, and where steps cannot be told apart."""


@dataclass
class Row:
    """Everything at one depth."""

    depth: int
    """Tokens already in the cache when timing starts."""
    prompt_tokens: int
    """Tokens of the prefill after these."""
    context_ids: list[int]
    """The ids of both."""
    new_ids: list[int]
    """The tokens every contestant was forced through."""
    results: list[Result]
    """One per contestant, in order."""


@dataclass
class CostFit:
    """How a contestant's decode step grows with what it retains or repeats."""

    contestant: str
    line: Line | None
    """Seconds per step against tokens before the step; null below three points."""
    kv_bytes_per_token: int | None
    """Bytes each retained token adds to what a step reads at the deepest row; null without."""
    floor_s_per_token: float | None
    """These bytes over the measured bandwidth. Seconds."""


@dataclass
class Gate:
    """One limit and what was found."""

    name: str
    """The option that set it."""
    passed: bool
    limit: float
    """In the option's own unit."""
    value: float | None
    """The worst found, in the same unit; null when there was none."""
    message: str


@dataclass
class Comparison:
    """One run of ``kvgen compare``, whole or as far as it came."""

    model: ModelFacts
    environment: Environment
    random_weights: bool
    """Whether the weights are random numbers: time and bytes are real, the text is not."""
    prompt: str
    prompt_source: PromptSource
    tokenize_s: float
    """Prompt to ids, once. Seconds; 0 for replayed ids."""
    new_tokens: int
    depths: list[int]
    repetitions: int
    warmup: bool
    contestants: list[ContestantFacts]
    complete: bool = False
    """False after an interruption, and in exports written on the way."""
    rows: list[Row] = field(default_factory=list)
    fits: list[CostFit] = field(default_factory=list)
    gates: list[Gate] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    """Why the numbers may not be trusted."""
    notes: list[str] = field(default_factory=list)
    """What a reader must know to read the numbers right."""
    runs: list[Run] = field(default_factory=list)
    """Raw samples, in the order they were taken."""
    ranks: RankShares | None = None
    """What each rank held after the last run of the reference; null for one process."""

    @property
    def reference(self) -> ContestantFacts:
        """The contestant all others are held against."""
        return self.contestants[0]

    @property
    def broken(self) -> list[tuple[int, Result]]:
        """Depth and result of every contestant that disagrees with the reference."""
        found = ((row.depth, result) for row in self.rows for result in row.results)
        return [(d, r) for d, r in found if r.agreement and r.agreement.verdict == "broken"]
