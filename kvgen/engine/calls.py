"""How a model's layers are called in a decode step, and how others can be called in their place.

Knows how transformers' models are built of layers and choose their attention and experts; nothing
of compilers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvgen.cache.adapter import TransformersCache
from kvgen.cache.spec import FULL, SLIDING, LayerSpec
from kvgen.engine.traced import CannotCompileError, TracedCache
from kvgen.models.failures import one_line

ATTENTION = "kvgen_compiled"
"""The attention that a model is set to while its step is compiled; no masks are made for it."""
_EXPERTS = "batched_mm"  # the library's way of running experts that depends on no token's value


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
        self.rest = repr([(p, spelled(leaf)) for p, leaf in found if not isinstance(leaf, Tensor)])
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


class Flow:
    """Where each layer's tensors come from: the layer before it, or outside of all layers."""

    def __init__(self) -> None:
        self.outside: list[Tensor] = []
        """What layers are given that no layer made, the first one's hidden states among it."""
        self.sources: list[list[int | None]] = []
        """For each tensor of each layer, its place in ``outside``; ``None`` is the result before
        it.
        """
        self._result: Tensor | None = None

    def add(self, call: Call, result: Tensor) -> None:
        """The next layer, and what it made of its call."""
        self.sources.append([self._source(tensor) for tensor in call.tensors])
        self._result = result

    def _source(self, tensor: Tensor) -> int | None:
        if tensor is self._result:
            return None
        for place, known in enumerate(self.outside):
            if tensor is known:
                return place
        self.outside.append(tensor)
        return len(self.outside) - 1


class Recorded(NamedTuple):
    """How a step calls a model's layers."""

    calls: list[Call]
    """One for each module that was asked for."""
    as_tuple: bool
    """Whether layers return tuples."""
    flow: Flow
    hidden: Tensor
    """What a layer returned."""


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


def recorded(
    model: Any, layers: Sequence[Any], others: Sequence[Any], steps: Callable[[], object]
) -> Recorded:
    """How ``steps``, which forwards single tokens, calls each of ``layers`` and ``others``.

    Raises ``CannotCompileError`` where calls change from token to token in more than the values of
    tensors, or where the model needs the mask that a compiled step has none of.
    """
    modules = [*layers, *others]
    calls: list[list[Call]] = [[] for _ in modules]
    results: list[list[Any]] = [[] for _ in modules]

    def recorder(own: Callable[..., Any], seen: list[Call], given: list[Any]) -> Any:
        def record(*args: Any, **kwargs: Any) -> Any:
            seen.append(Call(args, kwargs))
            given.append(own(*args, **kwargs))
            return given[-1]

        return record

    attended: list[int] = []

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        attended.append(1)
        return query.new_zeros(1, 1, query.shape[1], value.shape[-1]), None  # only shapes matter

    owns = [module.forward for module in modules]
    recorders = [recorder(*each) for each in zip(owns, calls, results, strict=True)]
    with attending(model, attention), standing_in(modules, recorders):
        try:
            steps()
        except Exception as error:  # whatever a model's own code does without what it expects
            raise CannotCompileError(f"cannot do without a mask ({one_line(error)})") from error
    if not attended:
        raise CannotCompileError("does not attend through transformers' attention interface")
    for first, *later in calls:
        for call in later:
            if [t.shape for t in call.tensors] != [t.shape for t in first.tensors]:
                raise CannotCompileError("hands its layers a tensor that grows with every token")
            if call.rest != first.rest:
                raise CannotCompileError("hands its layers a number that changes with every token")
    as_tuple = isinstance(results[0][0], tuple)
    flow = Flow()
    for seen, given in zip(calls[: len(layers)], results, strict=False):
        hidden, *more = given[0] if as_tuple else given[:1]
        if any(each is not None for each in more):
            raise CannotCompileError("has layers that return more than hidden states")
        flow.add(seen[0], hidden)
    if any(None not in sources for sources in flow.sources[1:]):
        raise CannotCompileError("does more between its layers than to call one after the other")
    return Recorded([seen[0] for seen in calls], as_tuple, flow, hidden)


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


@contextmanager
def batched_experts(model: Any) -> Iterator[None]:
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


def spelled(value: Any) -> str:
    """A setting's value, or the name of what is no plain value."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return repr([spelled(item) for item in value])
    return str(getattr(value, "__qualname__", type(value).__qualname__))


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
