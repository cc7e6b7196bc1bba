"""From a model's layers to compiled programs on disk, one program for all layers that are alike.

A layer is traced as a function of its weights, its inputs and its cache buffers, and compiled ahead
of time by torch's inductor into a file that later processes only load. What is compiled lies in
``KVGEN_CACHE_DIR/compiled``, under a hash of everything it depends on. Knows torch's compiler and
how transformers' models call their layers.
"""

from __future__ import annotations

import hashlib
import json
import platform
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import kvgen
from kvgen.cache.adapter import TransformersCache
from kvgen.cache.manager import KVCache
from kvgen.cache.spec import FULL, SLIDING, LayerSpec
from kvgen.engine.traced import BLOCK, CannotCompileError, RowProducts, TracedCache
from kvgen.errors import UsageError
from kvgen.models.failures import one_line
from kvgen.models.quiet import quiet_libraries
from kvgen.storage import cache_root, make_private

ATTENTION = "kvgen_compiled"
"""The attention that a model is set to while its step is compiled; no masks are made for it."""
_EXPERTS = "batched_mm"  # the library's way of running experts that depends on no token's value
# Loops are split for many threads, and run on as many as there are.
_SETTINGS: dict[str, Any] = {"cpp.threads": 16, "cpp.dynamic_threads": True}
_EXAMPLE_BLOCKS, _EXAMPLE_CAPACITY = 64, 96


class Call:
    """How a module is called in a decode step: its arguments, of which tensors are inputs."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._arguments = (args, kwargs)
        found = list(_leaves(self._arguments))
        self.where: list[tuple[Any, ...]] = [
            path for path, leaf in found if isinstance(leaf, Tensor)
        ]
        """Where each tensor lies in ``(args, kwargs)``."""
        self.tensors = [leaf for _, leaf in found if isinstance(leaf, Tensor)]
        self.rest = repr([(p, _spelled(leaf)) for p, leaf in found if not isinstance(leaf, Tensor)])
        """Everything else in the call, spelled out."""

    def with_inputs(self, tensors: Sequence[Tensor], cache: TracedCache | None) -> Any:
        """``(args, kwargs)`` with these tensors, and ``cache`` in place of the cache."""
        given = iter(tensors)
        return _mapped(
            self._arguments,
            lambda leaf: (
                next(given)
                if isinstance(leaf, Tensor)
                else cache
                if isinstance(leaf, TransformersCache)
                else leaf
            ),
        )


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


def find_layers(model: Any, specs: Sequence[LayerSpec]) -> list[Any]:
    """The decoder layers, in the order of the cache's. Raises ``CannotCompileError``."""
    for spec in specs:
        if spec.kind not in (FULL, SLIDING) or spec.index_dim or not spec.value_dim or spec.states:
            raise CannotCompileError(f"has layers that keep more than pairs ({spec.kind})")
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == len(specs):
            indices = [
                {getattr(part, "layer_idx", None) for part in layer.modules()} - {None}
                for layer in module
            ]
            if indices == [{index} for index in range(len(specs))]:
                return list(module)
    raise CannotCompileError("has no list of decoder layers that each own one layer of the cache")


def parts_of(
    model: Any, specs: Sequence[LayerSpec], step: Callable[[], object]
) -> tuple[list[Part], bool]:
    """The parts to compile, and whether layers return tuples; ``step`` forwards one token twice.

    Raises ``CannotCompileError``.
    """
    layers = find_layers(model, specs)
    head = model.get_output_embeddings()
    modules = [*layers, *([head] if type(head) is torch.nn.Linear else [])]
    calls: list[list[Call]] = [[] for _ in modules]
    results: list[Any] = []

    def recorder(index: int, own: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            calls[index].append(Call(args, kwargs))
            results.append(own(*args, **kwargs))
            return results[-1]

        return record

    own_attention = ALL_ATTENTION_FUNCTIONS["sdpa"]  # only shapes matter here
    stand_ins = [recorder(i, module.forward) for i, module in enumerate(modules)]
    with attending(model, own_attention), standing_in(modules, stand_ins):
        step()
    for first, second in calls:
        if [t.shape for t in first.tensors] != [t.shape for t in second.tensors]:
            raise CannotCompileError("hands its layers a tensor that grows with every token")
        if first.rest != second.rest:
            raise CannotCompileError("hands its layers a number that changes with every token")
    tuples = isinstance(results[0], tuple)
    if tuples and any(each is not None for each in results[0][1:]):
        raise CannotCompileError("has layers that return more than hidden states")
    common = [
        *(torch.__version__, transformers.__version__, kvgen.__version__, _own_code()),
        *(_device_name(model.device), json.dumps(model.config.to_dict(), default=str)),
    ]
    parts = []
    for module, spec, (call, _) in zip(modules, [*specs, None], calls, strict=False):
        described = "\n".join([*common, call.rest, *_described(module), *_shapes(call.tensors)])
        name = hashlib.sha256(described.encode()).hexdigest()
        parts.append(Part(module, spec, call, cache_root() / "compiled" / f"{name}.pt2"))
    return parts, tuples


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
        temporary.unlink(missing_ok=True)


def load_part(part: Part, device: torch.device) -> Callable[[list[Tensor]], list[Tensor]]:
    """The compiled program: inputs in a row in, outputs out. Raises ``RuntimeError``."""
    from torch._C._aoti import AOTIModelPackageLoader

    index = device.index if device.type == "cuda" and device.index is not None else -1
    loader = AOTIModelPackageLoader(str(part.file), "model", True, 1, index)
    return loader.run  # type: ignore[no-any-return]


@contextmanager
def standing_in(modules: Sequence[Any], stand_ins: Sequence[Callable[..., Any]]) -> Iterator[None]:
    """Within it, calling a module calls its stand-in."""
    for module, stand_in in zip(modules, stand_ins, strict=True):
        module.__dict__["forward"] = stand_in  # past Module.__setattr__, which costs microseconds
    try:
        yield
    finally:
        for module in modules:
            module.__dict__.pop("forward", None)


@contextmanager
def attending(model: Any, attention: Callable[..., Any] | None = None) -> Iterator[None]:
    """Within it, the model is set to ``ATTENTION``, which is what is given here, if anything."""
    configs = {id(c): c for c in (model.config, model.config.get_text_config(decoder=True))}
    before = [(config, config._attn_implementation_internal) for config in configs.values()]
    if attention is not None:
        ALL_ATTENTION_FUNCTIONS[ATTENTION] = attention
    try:
        for config in configs.values():
            config._attn_implementation_internal = ATTENTION
        yield
    finally:
        for config, own in before:
            config._attn_implementation_internal = own
        if attention is not None:
            del ALL_ATTENTION_FUNCTIONS[ATTENTION]


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
        cache = TracedCache(kv, *buffers, slots, span) if buffers else None
        args, kwargs = part.call.with_inputs(tensors, cache)
        named = dict(zip(_named_tensors(part.module), weights, strict=True))
        attention = cache.attention if cache else None
        with attending(model, attention), _batched_experts(model), RowProducts():
            result = torch.func.functional_call(part.module, named, args, kwargs)
        if cache is not None and cache.updates != 1:
            raise CannotCompileError("does not store one pair per layer and token")
        return result[0] if isinstance(result, tuple) else result


@contextmanager
def _batched_experts(model: Any) -> Iterator[None]:
    """Within it, experts run in a way that can be traced."""
    config = model.config.get_text_config(decoder=True)
    own = getattr(config, "_experts_implementation_internal", None)
    if own is not None:
        config._experts_implementation_internal = _EXPERTS
    try:
        yield
    finally:
        if own is not None:
            config._experts_implementation_internal = own


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


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """What lies at the ends of nested tuples, lists and mappings, each with its path."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))
    else:
        yield path, value


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same nesting with every leaf changed."""
    if isinstance(value, dict):
        return {key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_mapped(item, change) for item in value)
    return change(value)


def _described(module: Any) -> Iterator[str]:
    """Everything that could make two modules compute differently, but their weights' values."""
    for name, part in module.named_modules():
        settings = {
            key: _spelled(value)
            for key, value in sorted(vars(part).items())
            if not key.startswith("_") and key not in ("layer_idx", "training")
        }
        yield f"{name} {type(part).__module__}.{type(part).__qualname__} {settings}"
    yield from _shapes(_named_tensors(module).values())


def _shapes(tensors: Iterable[Tensor]) -> Iterator[str]:
    return (f"{tuple(t.shape)} {t.stride()} {t.dtype}" for t in tensors)


def _spelled(value: Any) -> str:
    """A setting's value, or the name of what is no plain value."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return repr([_spelled(item) for item in value])
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _own_code() -> str:
    """A hash of the code that decides what is compiled."""
    folder = Path(__file__).parent
    content = b"".join((folder / n).read_bytes() for n in ("compiling.py", "traced.py"))
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
