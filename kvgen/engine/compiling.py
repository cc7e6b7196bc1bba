"""A part of a model as a compiled program on disk.

It is traced as a function of its weights, its inputs and its cache buffers, and compiled ahead of
time by torch's inductor into a file that later processes only load. Knows torch's compiler.
"""

from __future__ import annotations

import os
import secrets
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvgen.cache.adapter import TransformersCache
from kvgen.cache.manager import KVCache
from kvgen.engine.calls import Call, Flow, attending, batched_experts, standing_in
from kvgen.engine.parts import Outside, Part
from kvgen.engine.traced import BLOCK, CannotCompileError, RowProducts, TracedCache
from kvgen.errors import UsageError
from kvgen.models.failures import one_line
from kvgen.models.quiet import quiet_libraries
from kvgen.storage import make_private

# Loops are split for many threads, and run on as many as there are. A product and a sum may be one
# instruction, which rounds once less.
_SETTINGS: dict[str, Any] = {
    "cpp.threads": 16,
    "cpp.dynamic_threads": True,
    "cpp.enable_floating_point_contract_flag": "fast",
}
_EXAMPLE_BLOCKS, _EXAMPLE_CAPACITY = 64, 96


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
