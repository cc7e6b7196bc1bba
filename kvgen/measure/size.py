"""What a model's cache costs in memory, worked out from its configuration alone. No torch.

Bytes are exact for the pairs and states that kvgen stores. Working memory is an estimate, and
named as one wherever it is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from kvgen.cache.policies import DEFAULT
from kvgen.cache.policy import Policy
from kvgen.cache.quantized import Quantized
from kvgen.cache.raw_config import decoder_settings
from kvgen.cache.settings import POSITIONS, Settings
from kvgen.cache.shapes import specs_from_config
from kvgen.cache.shares import share_of
from kvgen.cache.spec import NOTHING, LayerSpec
from kvgen.errors import InputError, UsageError
from kvgen.measure.architecture import Architecture
from kvgen.measure.fit import Fitter, Storage, find_storage, growth, kv_bytes, windowless
from kvgen.measure.size_records import Alternative, LayerGroup, Size, SizeRow


@dataclass(frozen=True)
class SizeOptions:
    """What to work out. Empty ``kv_dtypes`` means the checkpoint's own."""

    contexts: tuple[int, ...] = (4096, 32768, 131072)
    batches: tuple[int, ...] = (1,)
    kv_dtypes: tuple[str, ...] = ()
    cache: str | None = None
    budget: int | None = None
    as_if_full: bool = False
    prefill_chunk: int = 512
    ranks: int = 1
    """Over which the key/value heads are shared out; every figure is then one rank's."""


def size_of(architecture: Architecture, options: SizeOptions) -> Size:
    """Work it out.

    Raises ``ModelError`` naming what the configuration lacks, ``UsageError`` for options that
    exclude each other, ``InputError`` when the weights alone are larger than the budget.
    """
    fields = Settings(decoder_settings(architecture.config))
    expands = expands_latent(str(fields.get("model_type")))
    whole = specs_from_config(architecture.config, expand_latent=expands)
    stored = share_of(whole, fields, options.ranks)
    specs = windowless(stored) if options.as_if_full else stored
    names = dict.fromkeys(options.kv_dtypes or (architecture.dtype,))
    storages = [find_storage(name, architecture.itemsize, options.cache) for name in names]
    first = storages[0]
    size = Size(
        model=architecture.name,
        model_type=str(fields.get("model_type")),
        dtype=architecture.dtype,
        cache=options.cache or DEFAULT,
        context_limit=fields.integer(*POSITIONS),
        weight_bytes=_weight_share(architecture, options.ranks),
        weight_source=architecture.weight_source,
        groups=list(_groups(specs, first)),
        kv_dtype=first.name,
        bytes_per_token=growth(windowless(specs), first),
        bytes_per_token_later=growth(specs, first, after=1 << 24),
        fixed_bytes=sum(_fixed(spec, first.itemsize) or 0 for spec in specs),
        notes=list(_notes(stored, first.policy, options.as_if_full)),
        ranks=options.ranks,
    )
    if options.ranks > 1:
        size.notes.insert(0, _share_note(whole, stored, options.ranks))
    size.alternatives = _alternatives(architecture, fields, expands, first)
    for context in options.contexts:
        for batch in options.batches:
            for storage in storages:
                held = kv_bytes(specs, context, storage, batch)
                size.rows.append(SizeRow(context, batch, storage.name, held))
    beyond = [n for n in options.contexts if size.context_limit and n > size.context_limit]
    if beyond:
        size.notes.append(
            f"{min(beyond):,} tokens and more are beyond this model's {size.context_limit:,}; the "
            "figures say what they would take"
        )
    if options.budget is not None:
        left = options.budget - _weights(architecture, options)
        fitter = Fitter(left, fields, specs, architecture.itemsize, options.prefill_chunk)
        size.budget_bytes, size.prefill_chunk = options.budget, options.prefill_chunk
        size.fits = [fitter.longest(storage, size.context_limit) for storage in storages]
        by_name = {storage.name: storage for storage in storages}
        for row in size.rows:
            row.largest_batch = fitter.largest_batch(row.context, by_name[row.kv_dtype])
    return size


def _weight_share(architecture: Architecture, ranks: int) -> int | None:
    weights = architecture.weight_bytes
    return None if weights is None else -(-weights // ranks)


def _share_note(whole: Sequence[LayerSpec], stored: Sequence[LayerSpec], ranks: int) -> str:
    note = (
        f"all figures are those of one rank of {ranks}, if transformers' plan for the model shares "
        "its attention out; weights are an even share (norms are whole on every rank)"
    )
    if any(a == b and b.kind != NOTHING for a, b in zip(whole, stored, strict=True)):
        note += "; layers without heads of their own are whole on every rank"
    return note


def _weights(architecture: Architecture, options: SizeOptions) -> int:
    weights, budget = _weight_share(architecture, options.ranks), options.budget or 0
    if weights is None:
        raise UsageError(
            f"the weights of {architecture.name} cannot be estimated from its configuration; "
            "--budget needs the model's folder or Hub id"
        )
    if weights >= budget:
        raise InputError(
            f"the weights alone are {weights:,} bytes ({architecture.weight_source}), more than "
            f"the budget of {budget:,}"
        )
    return weights


def expands_latent(model_type: str) -> bool:
    """Whether the installed transformers hands over the keys and values made from a latent.

    Since the release whose models bring an ``expand_kv``, they hand over the latent itself. Read
    off the installed source, because importing it takes seconds.
    """
    package = find_spec("transformers")
    for folder in (package.submodule_search_locations or ()) if package else ():
        name = model_type.removesuffix("_text")
        source = Path(folder) / "models" / name / f"modeling_{name}.py"
        if source.is_file():
            return "expand_kv" not in source.read_text("utf-8")
    return False


def _fixed(spec: LayerSpec, itemsize: int) -> int | None:
    if spec.states is None:
        return None
    return sum(state.bytes_used(itemsize) for state in spec.states)


def _groups(specs: Sequence[LayerSpec], storage: Storage) -> Iterator[LayerGroup]:
    counts: dict[LayerSpec, int] = {}
    for spec in specs:
        counts[spec] = counts.get(spec, 0) + 1
    for spec, layers in counts.items():
        fixed = _fixed(spec, storage.itemsize)
        grown = growth(windowless([spec] * layers), storage)
        yield LayerGroup(
            kind=spec.kind,
            layers=layers,
            num_key_value_heads=spec.num_key_value_heads,
            key_dim=spec.key_dim,
            value_dim=spec.value_dim,
            window=spec.window,
            bytes_per_token=grown,
            fixed_bytes=None if fixed is None else fixed * layers,
            formula=_formula(spec, layers, storage, grown),
        )


def _formula(spec: LayerSpec, layers: int, storage: Storage, grown: int) -> str:
    """The formula with this model's numbers in it; empty for layers without pairs."""
    if not spec.has_pairs:
        return ""
    many = f"{layers} layers × {spec.num_key_value_heads} KV heads"
    if isinstance(storage.policy, Quantized):
        codes = f"codes and scales of int{storage.policy.bits}"
        return f"{many} × {codes} = {grown:,} bytes per token"
    if spec.key_dim == spec.value_dim:
        many = f"2 × {many} × {spec.key_dim} head_dim"
    else:
        many += f" × ({spec.key_dim} + {spec.value_dim})"
    also = ", and what chooses among them" if spec.index_dim or spec.compressed else ""
    return f"{many} × {storage.itemsize} bytes{also} = {grown:,} bytes per token"


def _notes(specs: Sequence[LayerSpec], policy: Policy, as_if_full: bool) -> Iterator[str]:
    windows = sorted({spec.window for spec in specs if spec.window})
    if windows and as_if_full:
        yield (
            "as if full: sliding layers are counted for the whole context, as servers do that "
            "reserve one size for all layers; kvgen keeps less"
        )
    elif windows:
        kept = " and ".join(f"{window - 1:,}" for window in windows)
        yield (
            f"sliding layers stop growing at {kept} pairs; some servers reserve them in full "
            "(--as-if full)"
        )
    if any(spec.states for spec in specs):
        yield "recurrent states are kept in float32, whatever the dtype of the cache"
    if policy.note:
        yield policy.note


def _alternatives(
    architecture: Architecture, fields: Settings, expands: bool, storage: Storage
) -> list[Alternative]:
    """Latent attention in both forms, whole; which of them is stored, transformers decides."""
    found = []
    if fields.integer("kv_lora_rank"):
        for name, expand in (("compressed latent", False), ("expanded keys and values", True)):
            specs = specs_from_config(architecture.config, expand_latent=expand)
            found.append(Alternative(name, growth(specs, storage), expand == expands))
    return found
