"""Requests made ready for a model: token ids, and every setting that their results depend on."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from kvgen.cache.policies import DEFAULT
from kvgen.engine.prompt import check_fits, check_known, check_text, encode, encode_chat
from kvgen.engine.sampling import SamplingOptions
from kvgen.errors import KvgenError, UsageError
from kvgen.measure.requests import Id, Rejected, Request
from kvgen.measure.run import DEFAULT_NEW_TOKENS
from kvgen.models import LoadedModel

DEFAULT_BATCH_SIZE = 8


@dataclass(frozen=True)
class BatchOptions:
    """How a batch runs; what a request says for itself wins over the rest."""

    batch_size: int = DEFAULT_BATCH_SIZE
    """Rows that are decoded together, at most."""
    share_prefix: bool = True
    """Forward only once what prompts have in common at their beginning."""
    prefix_budget: int | None = None
    """Bytes that stored prefixes may take; ``None`` is a part of what is free."""
    max_new_tokens: int | None = None
    chat: bool = False
    system: str | None = None
    parse_special: bool = False
    """Read special tokens that prompts spell out as what they name."""
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    cache: str = DEFAULT
    """The storage policy with its options, as ``find_policy`` reads it."""
    prefill_chunk: int | None = None
    """Forward prompts in pieces of at most this many tokens."""
    force: bool = False
    """Go on where memory is predicted not to suffice."""


@dataclass(frozen=True)
class Prompt:
    """One request as token ids; ``digest`` is of all that its new ids depend on, and
    ``input`` of the request alone.
    """

    id: Id
    ids: list[int]
    new_tokens: int
    stop: tuple[str, ...]
    sampling: SamplingOptions
    digest: str
    input: str

    @property
    def tokens(self) -> int:
        """Of the whole sequence that is stored: the last new token never is."""
        return len(self.ids) + self.new_tokens - 1


def prepare_prompts(
    loaded: LoadedModel, requests: Sequence[Request], options: BatchOptions
) -> tuple[list[Prompt], list[Rejected]]:
    """The prompts, and the requests that cannot be served."""
    base = options.sampling.seed
    base = secrets.randbits(32) if base is None else base
    prompts, rejected = [], []
    for request in requests:
        try:
            prompts.append(_prepared(loaded, request, options, base))
        except KvgenError as error:
            rejected.append(Rejected(request.line, request.id, str(error)))
    return prompts, rejected


def unfinished(prompts: Sequence[Prompt], finished: Mapping[Id, str]) -> list[Prompt]:
    """Those that no earlier run has finished; ``finished`` has the digest of each result by id.

    Raises ``UsageError`` for a result of another prompt, or of one that is not given.
    """
    digests = {prompt.id: prompt.digest for prompt in prompts}
    for key, digest in finished.items():
        if digests.get(key) != digest:
            known = key in digests
            other = "a prompt or settings that differ" if known else "a prompt not given now"
            raise UsageError(
                f"the result with the id {json.dumps(key)} was made from {other}; go on with the "
                "same prompts and options, or write to another file"
            )
    return [prompt for prompt in prompts if prompt.id not in finished]


def _prepared(loaded: LoadedModel, request: Request, options: BatchOptions, base: int) -> Prompt:
    """Raises ``KvgenError`` for what cannot be served."""
    ids = _ids(loaded, request, options)
    check_known(ids, loaded.vocabulary)
    asked = request.max_new_tokens or options.max_new_tokens
    room = check_fits(len(ids), asked, loaded.context_limit)
    wanted = asked or min(DEFAULT_NEW_TOKENS, room or DEFAULT_NEW_TOKENS)
    stop = options.stop if request.stop is None else request.stop
    seed = options.sampling.seed if request.seed is None else request.seed
    depends = {
        "model": [loaded.source.name, loaded.source.revision, loaded.source.sha256],
        "dtype": str(loaded.dtype),
        "cache": options.cache,
        "ids": ids,
        "new": wanted,
        "stop": [*stop, options.ignore_eos],
        "sampling": asdict(options.sampling) | {"seed": seed},
    }
    digest = hashlib.sha256(json.dumps(depends).encode()).hexdigest()[:16]
    sampling = replace(options.sampling, seed=_row_seed(request, base))
    return Prompt(request.id, ids, wanted, stop, sampling, digest, request.digest)


def _ids(loaded: LoadedModel, request: Request, options: BatchOptions) -> list[int]:
    if request.messages is not None:
        for message in request.messages:
            check_text(message["content"])
        return encode_chat(loaded.tokenizer, request.messages, options.parse_special)
    system = options.system if request.system is None else request.system
    chat = (options.chat or system is not None) if request.chat is None else request.chat
    return encode(loaded.tokenizer, request.prompt or "", chat, system, options.parse_special)


def _row_seed(request: Request, base: int) -> int:
    """A row's own: made from the batch's and the id, whatever runs beside it."""
    if request.seed is not None:
        return request.seed
    text = json.dumps([base, request.id])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
