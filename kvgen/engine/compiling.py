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
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from kvgen.cache.manager import KVCache
from kvgen.cache.spec import LayerSpec
from kvgen.engine.calls import (
    Call,
    attending,
    batched_experts,
    find_layers,
    recorded,
    spelled,
)
from kvgen.engine.traced import BLOCK, CannotCompileError, RowProducts, TracedCache
from kvgen.errors import UsageError
from kvgen.models.failures import one_line
from kvgen.models.quiet import quiet_libraries
from kvgen.storage import cache_root, make_private

# Loops are split for many threads, and run on as many as there are.
_SETTINGS: dict[str, Any] = {"cpp.threads": 16, "cpp.dynamic_threads": True}
_EXAMPLE_BLOCKS, _EXAMPLE_CAPACITY = 64, 96


@dataclass
class Part:
    """A module that is compiled: a decoder layer, or the head that gives the logits."""

    module: Any
    spec: LayerSpec | None
    """What the layer stores; ``None`` for the head."""
    call: Call
    file: Path

    @property
    def weights(self) -> list[Tensor]:
        """What it multiplies with, in the order in which its program takes them."""
        return list(_named_tensors(self.module).values())


def parts_of(
    model: Any, specs: Sequence[LayerSpec], steps: Callable[[], object]
) -> tuple[list[Part], bool]:
    """The parts to compile, and whether layers return tuples.

    ``steps`` forwards single tokens. Raises ``CannotCompileError``.
    """
    modules = find_layers(model, specs)
    head = model.get_output_embeddings()
    if type(head) is torch.nn.Linear:
        modules.append(head)
    calls, as_tuple = recorded(model, modules, steps)
    common = [torch.__version__, transformers.__version__, _own_code(), _device_name(model.device)]
    of_layers = json.dumps(model.config.to_dict(), default=str, sort_keys=True)
    parts = []
    for module, spec, call in zip_longest(modules, specs, calls):
        described = [*common, call.rest, *_described(module), *_shapes(call.tensors)]
        if spec is not None:
            described.append(of_layers)
        name = hashlib.sha256("\n".join(described).encode()).hexdigest()
        parts.append(Part(module, spec, call, cache_root() / "compiled" / f"{name}.pt2"))
    return parts, as_tuple


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

    def forward(
        self,
        weights: list[Tensor],
        tensors: list[Tensor],
        buffers: list[Tensor] | None = None,
        slots: Tensor | None = None,
        span: Tensor | None = None,
    ) -> Tensor:
        part, model, kv = self._rest
        cache = None
        if buffers is not None and slots is not None and span is not None:
            cache = TracedCache(kv, buffers, slots, span)
        args, kwargs = part.call.with_inputs(tensors, cache)
        named = dict(zip(_named_tensors(part.module), weights, strict=True))
        attention = cache.attention if cache else None
        with attending(model, attention), batched_experts(model), RowProducts():
            result = torch.func.functional_call(part.module, named, args, kwargs)
        if cache is not None and cache.updates != 1:
            raise CannotCompileError("does not store one pair per layer and token")
        return result[0] if isinstance(result, tuple) else result


def _traced(part: Part, model: Any, cache: KVCache) -> Any:
    """The part as an exported program."""
    weights, inputs = part.weights, part.call.tensors
    arguments: tuple[Any, ...] = (weights, inputs)
    grows = torch.export.Dim.DYNAMIC
    dynamic: tuple[Any, ...] = ([None] * len(weights), [None] * len(inputs))
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
        dynamic += ([{2: grows}, {2: grows}], {0: grows}, None)
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


def _named_tensors(module: Any) -> dict[str, Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


def _described(module: Any) -> Iterator[str]:
    """Everything that could make two modules compute differently, but their weights' values."""
    for name, part in module.named_modules():
        settings = {
            key: spelled(value)
            for key, value in sorted(vars(part).items())
            if not key.startswith("_") and key not in ("layer_idx", "training")
        }
        yield f"{name} {type(part).__module__}.{type(part).__qualname__} {settings}"
    yield from _shapes(_named_tensors(module).values())


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
