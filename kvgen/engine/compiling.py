"""From a model's layers to compiled programs on disk, one program for all layers that are alike.

A layer is traced as a function of its weights, its inputs and its cache buffers, and compiled ahead
of time by torch's inductor into a file that later processes only load. What is compiled lies in
``KVGEN_CACHE_DIR/compiled``, under a hash of everything it depends on. Knows torch's compiler and
how transformers' models call their layers.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import secrets
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

from kvgen.cache.adapter import TransformersCache
from kvgen.cache.manager import KVCache
from kvgen.cache.spec import LayerSpec
from kvgen.engine.calls import (
    Call,
    Flow,
    Recorded,
    attending,
    batched_experts,
    find_layers,
    recorded,
    spelled,
    standing_in,
)
from kvgen.engine.traced import BLOCK, CannotCompileError, RowProducts, TracedCache
from kvgen.errors import UsageError
from kvgen.models.failures import one_line
from kvgen.models.quiet import quiet_libraries
from kvgen.storage import cache_root, make_private

# Loops are split for many threads, and run on as many as there are. A product and a sum may be one
# instruction, which rounds once less.
_SETTINGS: dict[str, Any] = {
    "cpp.threads": 16,
    "cpp.dynamic_threads": True,
    "cpp.enable_floating_point_contract_flag": "fast",
}
_EXAMPLE_BLOCKS, _EXAMPLE_CAPACITY = 64, 96


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


def compile_part(part: Part, model: Any, cache: KVCache) -> None:
    """Trace a part and compile it into its file. Raises ``CannotCompileError``, ``UsageError``."""
    folder = part.file.parent
    temporary = folder / f".{secrets.token_hex(8)}.pt2"
    if model.device.type == "cpu":
        _require_compiler()
    try:
        make_private(folder)
        with quiet_libraries(), torch.no_grad():
            program = _traced(part, model, cache)
            torch._inductor.aoti_compile_and_package(
                program,
                package_path=str(temporary),
                inductor_configs=_SETTINGS if model.device.type == "cpu" else {},
            )
        temporary.replace(part.file)
    except OSError as error:
        raise UsageError(f"cannot keep the compiled step in {folder}: {error.strerror}") from error
    except CannotCompileError:
        raise
    except Exception as error:  # the compiler's parts raise nearly every type there is
        raise CannotCompileError(f"cannot be traced ({one_line(error)})") from error
    finally:
        with suppress(OSError):  # where the folder is none, nothing is left in it
            temporary.unlink()


def load_part(part: Part, device: torch.device) -> Callable[[list[Tensor]], list[Tensor]] | None:
    """The compiled program: inputs in a row in, outputs out. ``None`` if there is no whole one."""
    from torch._C._aoti import AOTIModelPackageLoader

    if not _is_whole(part.file):
        return None
    index = device.index if device.type == "cuda" and device.index is not None else -1
    try:
        with _unpacking():
            loader = AOTIModelPackageLoader(str(part.file), "model", True, 1, index)
    except RuntimeError:  # of another build, or there is no room to unpack it
        return None
    run: Callable[[list[Tensor]], list[Tensor]] = loader.run
    return run


def _is_whole(file: Path) -> bool:
    """By the checksums in it: a damaged program could end the process without a word."""
    try:
        with zipfile.ZipFile(file) as packed:
            return packed.testzip() is None
    except Exception:  # a damaged archive raises nearly every type there is
        return False


@cache
def _unpack_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="kvgen-")


@contextmanager
def _unpacking() -> Iterator[None]:
    """Have what torch unpacks go with this process; it would stay behind otherwise."""
    before = os.environ.get("TMPDIR")
    try:
        os.environ["TMPDIR"] = _unpack_folder().name
        yield
    except OSError as error:
        raise UsageError(
            f"cannot unpack the compiled step: {error.strerror}; the environment variable TMPDIR "
            "names another folder for temporary files"
        ) from error
    finally:
        os.environ.pop("TMPDIR", None)
        if before is not None:
            os.environ["TMPDIR"] = before


class _Program(torch.nn.Module):  # type: ignore[misc]  # torch is read without its types
    """A part as a function of everything that it reads or writes."""

    def __init__(self, part: Part, model: Any, cache: KVCache) -> None:
        super().__init__()
        self._rest = (part, model, cache)  # in a tuple, so that nothing of it counts as a weight

    def forward(self, weights: list[Tensor], tensors: list[Tensor], *more: Any) -> Any:
        """``more`` are a layer's buffers, slots and span, or what the last layer returned."""
        part, model, kv = self._rest
        if part.outside is not None:
            return self._outside(part.outside, weights, tensors, *more)
        cache = TracedCache(kv, *more) if part.spec is not None else None
        with attending(model, cache.attention if cache else None), batched_experts(model):
            result = self._called(weights, tensors, cache)
        if cache is not None and cache.updates != 1:
            raise CannotCompileError("does not store one pair per layer and token")
        return result[0] if isinstance(result, tuple) else result

    def _outside(
        self,
        outside: Outside,
        weights: list[Tensor],
        tensors: list[Tensor],
        hidden: Tensor | None = None,
    ) -> Any:
        _, model, kv = self._rest
        flow = Flow()
        result = torch.zeros_like(outside.recorded.hidden) if hidden is None else hidden

        def layer(*args: Any, **kwargs: Any) -> Any:
            flow.add(Call(args, kwargs), result)
            return (result,) if outside.recorded.as_tuple else result

        stand_ins = standing_in(outside.layers, [layer] * len(outside.layers))
        with attending(model), stand_ins:
            output = self._called(weights, tensors, TransformersCache(kv))
        if flow.sources != outside.recorded.flow.sources:
            raise CannotCompileError("calls its layers in another way while it is traced")
        return output.logits if outside.after else flow.outside

    def _called(self, weights: list[Tensor], tensors: list[Tensor], cache: Any) -> Any:
        part = self._rest[0]
        args, kwargs = part.call.with_inputs(tensors, cache)
        named = dict(zip(part.named, weights, strict=True))
        with RowProducts():
            return torch.func.functional_call(part.module, named, args, kwargs)


def _traced(part: Part, model: Any, cache: KVCache) -> Any:
    """The part as an exported program."""
    weights, inputs = list(part.named.values()), part.call.tensors
    arguments: tuple[Any, ...] = (weights, inputs)
    grows = torch.export.Dim.DYNAMIC
    more: tuple[Any, ...] = ()
    if part.spec is not None:
        heads, capacity = part.spec.num_key_value_heads, _EXAMPLE_CAPACITY * BLOCK
        where = {"device": model.device, "dtype": model.dtype}
        slots = torch.arange(_EXAMPLE_BLOCKS * BLOCK, device=model.device).view(-1, BLOCK)
        span = torch.tensor([0, slots.numel() - 1], device=model.device)
        buffers = [
            torch.zeros(1, heads, capacity, dim, **where)
            for dim in (part.spec.key_dim, part.spec.value_dim)
        ]
        arguments += (buffers, slots, span)
        more = ([{2: grows}, {2: grows}], {0: grows}, None)
    elif part.outside is not None and part.outside.after:
        arguments += (part.outside.recorded.hidden,)
        more = (None,)
    dynamic = ([None] * len(weights), [None] * len(inputs), *([more] if more else []))
    program = _Program(part, model, cache)
    return torch.export.export(program, arguments, dynamic_shapes=dynamic, strict=False)


def _require_compiler() -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:  # its class has moved between releases
        raise UsageError(
            "--compile needs a C++ compiler, and there is none: install g++ or clang++, or name "
            "one in the environment variable CXX, or leave out --compile"
        ) from error


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
    folder = Path(__file__).parent
    content = b"".join((folder / n).read_bytes() for n in ("calls.py", "compiling.py", "traced.py"))
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
