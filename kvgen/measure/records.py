"""What a run leaves behind: plain data, no torch. Seconds are ``*_s``, bytes are ``*_bytes``.

A record is all that reports get; nothing in it is rounded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from kvgen.cache.reuse import Receipt


@dataclass
class Step:
    """One new token and what it cost."""

    index: int
    """0 for the token that prefill gives, counting up."""
    token_id: int
    token: str
    """The token by itself, special ones by name."""
    text: str
    """The text it completes; empty while a character is unfinished. Pieces join to the whole."""
    position: int
    """Absolute position of the new token in the sequence, counting from 0."""
    latency_s: float
    """Forward and choice of the token; nothing decoded to text or printed."""
    forwarded_tokens: int
    """Tokens this step sent through the model."""
    cached_tokens: int
    """Tokens in the cache after this step; 0 without a cache."""
    kv_bytes_used: int
    kv_bytes_allocated: int
    bytes_read: int
    """Bytes the step had to read at least: weights and stored pairs, each once."""
    bandwidth_share: float | None = None
    """``bytes_read`` / ``latency_s`` over the measured bandwidth of the machine."""
    recompute_s: float | None = None
    """The same token from an uncached forward over the whole prefix."""
    recompute_source: Literal["measured", "fitted"] | None = None


@dataclass
class CheckedStep:
    """One prediction held against the uncached forward over the same ids."""

    index: int
    same_token: bool
    """Both give the same most likely token."""
    max_abs_logit_difference: float
    margin: float
    """Uncached logit of the most likely token minus that of the second."""


Verdict = Literal["exact", "tolerance", "rescaled", "lossy", "broken"]


@dataclass
class Check:
    """All predictions that were checked, and what they amount to."""

    steps: list[CheckedStep]
    tolerance: float
    """Largest |Δlogit| that counts as the same in this dtype."""
    verdict: Verdict
    lossy_tolerance: float | None = None
    """Largest |Δlogit| accepted from a storage policy that changes predictions; absent for one
    that does not, and for one that promises no limit."""

    @property
    def max_abs_logit_difference(self) -> float:
        """Over all checked steps."""
        return max(step.max_abs_logit_difference for step in self.steps)

    @property
    def same_tokens(self) -> int:
        """Steps at which both have the same most likely token."""
        return sum(step.same_token for step in self.steps)


@dataclass
class Totals:
    """Sums over the run."""

    load_s: float
    tokenize_s: float
    prefill_s: float
    """The first step: the whole prompt forwarded and the first token chosen."""
    decode_s: float
    """All later steps together."""
    detokenize_s: float
    ttft_s: float
    """From the request to the first token: tokenize, read the prompt-cache file, prefill."""
    tpot_s: float | None
    """Mean time per output token after the first; absent below two tokens."""
    forwarded_tokens: int
    recompute_s: float | None
    """What all tokens together would have cost without a cache."""


@dataclass
class Reuse:
    """The receipt: what of the prompt was already there, and what that saved."""

    submitted: int
    """Prompt tokens."""
    matched: int
    """Of them, how many begin what was stored as well."""
    reused: int
    """Of them, how many were taken from there."""
    computed: int
    """Prompt tokens that were forwarded."""
    why_fewer: str | None = None
    """Why fewer were reused than matched."""
    why_no_further: str | None = None
    """What ended the match before the prompt's end."""
    saved_s: float | None = None
    """What forwarding the reused tokens took when they were stored."""
    file: str | None = None
    """The prompt-cache file."""
    file_tokens: int | None = None
    """Tokens that it held; absent if it was not there."""
    file_bytes: int | None = None
    read_s: float | None = None
    """Reading the file, every byte checked."""
    identify_s: float | None = None
    """Finding out whether it belongs to this model; once per loaded model."""

    @classmethod
    def of(cls, receipt: Receipt, why_no_further: str | None = None) -> Reuse:
        """The record of a cache's own receipt."""
        return cls(
            receipt.submitted,
            receipt.matched,
            receipt.reused,
            receipt.computed,
            receipt.why_fewer,
            why_no_further,
            receipt.saved_s,
        )


@dataclass
class Kept:
    """What a run left in its prompt-cache file."""

    file: str
    tokens: int | None = None
    """Tokens that the file holds now; absent if nothing was written."""
    bytes: int | None = None
    write_s: float | None = None
    snapshot: bool = False
    """Whether it holds the cache as it was one token before the prompt's end, because it cannot
    go back."""
    why_not: str | None = None
    """Why nothing was written, where there was no need or no way to."""
    error: str | None = None
    """What went wrong in writing it; the file is then as it was."""


@dataclass
class Environment:
    """Where and with what the run was made."""

    kvgen: str
    kvgen_revision: str | None
    """Git commit of kvgen's own checkout, with + for changes; absent when installed."""
    python: str
    torch: str
    transformers: str
    platform: str
    cpu: str
    cores: int
    """Processors that this process may run on."""
    threads: int
    load_average: float | None
    """Processes waiting to run over the last minute, where the system tells."""
    device: str
    dtype: str
    attention: str
    bandwidth_bytes_per_s: float | None
    """Large reads, measured once on this machine and remembered."""
    products: dict[str, str] | None = None
    """How each shape of linear layer multiplies one row, where that was chosen by timing: whole,
    as the library does, in blocks, or over packed weights."""


@dataclass
class ModelFacts:
    """The model and the numbers behind its cache."""

    name: str
    source: str
    path: str
    revision: str | None
    model_type: str
    parameters: int
    weight_bytes: int
    num_hidden_layers: int
    context_limit: int | None
    kv_bytes_per_token: int | None
    """Growth of the cache per token before any window is full; absent without a cache."""


@dataclass
class RankShares:
    """A run over several ranks: what each of them holds at the end, in rank order. Bytes elsewhere
    in the record are those of rank 0.
    """

    size: int
    backend: str
    """What carries tensors between them."""
    weight_bytes: list[int]
    """Weights and buffers. Bytes."""
    kv_bytes_used: list[int]
    """Pairs held, counted on the tensors. Bytes."""
    kv_bytes_allocated: list[int]
    """Storage owned for them. Bytes."""
    kv_bytes_formula: int | None
    """What the formula gives for a rank. Bytes."""


@dataclass
class Compilation:
    """What it took to have the decode step compiled, before anything was timed."""

    compile_s: float
    """From the loaded model to a step that can run, a first proof of it included."""
    programs: int
    """Different ones; layers that are alike share one."""
    compiled: int
    """How many of them were compiled now; the others were found on disk."""


@dataclass
class Generation:
    """One run of ``kvgen generate``, whole or as far as it came."""

    model: ModelFacts
    environment: Environment
    cached: bool
    prompt: str
    prompt_tokens: int
    prompt_ids: list[int]
    max_new_tokens: int
    prefill_chunk: int | None
    sampling: dict[str, float | int | None]
    cache: str | None = None
    """The storage policy; absent without a cache."""
    text: str = ""
    finish_reason: Literal["length", "end", "stop", "interrupted", "memory"] = "length"
    stop_string: str | None = None
    kv_bytes_formula: int | None = None
    """What the formula gives for the tokens in the cache at the end; absent without a rule."""
    steps: list[Step] = field(default_factory=list)
    totals: Totals | None = None
    check: Check | None = None
    reuse: Reuse | None = None
    kept: Kept | None = None
    """Absent without a prompt-cache file that may be written."""
    notes: list[str] = field(default_factory=list)
    """What a reader must know to read the numbers right."""
    ranks: RankShares | None = None
    """Absent where one process runs the whole model."""
    compilation: Compilation | None = None
    """Absent where the step was not compiled."""
