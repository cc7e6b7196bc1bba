"""What of a model is compiled, part by part, and under which name each program is found again.

Layers that are alike share one program. A name is a hash of everything that a program depends on.
Knows how transformers' models are built; nothing of compilers.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

from kvgen.cache.spec import LayerSpec
from kvgen.engine.calls import Call, Recorded, find_layers, recorded, spelled
from kvgen.storage import cache_root


class Outside(NamedTuple):
    """The place of a program that is the model without its layers."""

    layers: Sequence[Any]
    recorded: Recorded
    after: bool
    """After the last layer, or before the first."""


@dataclass
class Part:
    """What one program computes: a decoder layer, the head that gives the logits, or the model
    without its layers, before them or after.
    """

    module: Any
    call: Call
    file: Path
    spec: LayerSpec | None = None
    """What a layer stores."""
    outside: Outside | None = None

    @cached_property
    def named(self) -> dict[str, Tensor]:
        """What it multiplies with, in the order in which its program takes it."""
        return _named_tensors(self.module, self.outside.layers if self.outside else ())


class Parts(NamedTuple):
    """All programs of a step: one for each layer, and for what lies around them."""

    layers: list[Part]
    before: Part | None
    """Gives what ``flow`` says is ``outside`` of layers; ``None`` where the model's own code does.
    """
    after: Part | None
    """The logits of what the last layer returns; or only the head, if even that, without
    ``before``.
    """
    recorded: Recorded


def parts_of(
    model: Any, specs: Sequence[LayerSpec], steps: Callable[[], object], step: Call | None
) -> Parts:
    """The parts to compile. ``steps`` forwards single tokens; ``step`` is such a call of the model,
    where what is outside of its layers depends on no more than the call's tensors.

    Raises ``CannotCompileError``.
    """
    layers, head = find_layers(model, specs), model.get_output_embeddings()
    heads = [head] if step is None and type(head) is torch.nn.Linear else []
    found = recorded(model, layers, heads, steps)
    common = [torch.__version__, transformers.__version__, _own_code(), _device_name(model.device)]
    settings = {k: v for k, v in model.config.to_dict().items() if k != "_name_or_path"}
    configured = [*common, json.dumps(settings, default=str, sort_keys=True)]

    def part(of: list[str], module: Any, call: Call, **more: Any) -> Part:
        new = Part(module, call, Path(), **more)
        described = [*of, call.rest, *_described(new), *_shapes(call.tensors)]
        name = hashlib.sha256("\n".join(described).encode()).hexdigest()
        new.file = cache_root() / "compiled" / f"{name}.pt2"
        return new

    each = zip(layers, specs, found.calls, strict=False)
    parts = [part(configured, layer, call, spec=spec) for layer, spec, call in each]
    if step is None:
        last = [part(common, head, found.calls[-1]) for head in heads]
        return Parts(parts, None, last[0] if last else None, found)
    before, after = (
        part(configured, model, step, outside=Outside(layers, found, last))
        for last in (False, True)
    )
    return Parts(parts, before, after, found)


def _named_tensors(module: Any, without: Sequence[Any]) -> dict[str, Tensor]:
    """Weights and buffers of ``module``, but those of its parts ``without``."""
    left_out = {id(t) for part in without for t in (*part.parameters(), *part.buffers())}
    every = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor for name, tensor in every if id(tensor) not in left_out}


def _described(part: Part) -> Iterator[str]:
    """Everything that could make two parts compute differently, but their weights' values."""
    outside = part.outside
    left_out = {id(m) for layer in (outside.layers if outside else ()) for m in layer.modules()}
    for name, module in part.module.named_modules():
        if id(module) in left_out:
            continue
        settings = {
            key: spelled(value)
            for key, value in sorted(vars(module).items())
            if not key.startswith("_") and key not in ("layer_idx", "training")
        }
        yield f"{name} {type(module).__module__}.{type(module).__qualname__} {settings}"
    yield from _shapes(part.named.values())
    if outside is not None:
        yield f"{'after' if outside.after else 'before'} {outside.recorded.flow.sources}"


def _shapes(tensors: Iterable[Tensor]) -> Iterator[str]:
    return (f"{tuple(t.shape)} {t.stride()} {t.dtype}" for t in tensors)


def _own_code() -> str:
    """A hash of the code that decides what is compiled."""
    names = ("calls.py", "compiling.py", "parts.py", "traced.py")
    content = b"".join(Path(__file__).with_name(name).read_bytes() for name in names)
    return hashlib.sha256(content).hexdigest()


def _device_name(device: torch.device) -> str:
    """What code is compiled for."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device))
    try:  # code is compiled for this very processor
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        own = {line for line in lines if line.startswith(("model name", "flags", "Features"))}
    except OSError:
        own = {platform.processor()}
    return " ".join([platform.machine(), *sorted(own)])
