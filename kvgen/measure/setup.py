"""From what was asked for to a ``ComparisonRun`` ready to go: tokens, contestants, facts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from kvgen.cache.adapter import specs_for
from kvgen.cache.manager import KVCache
from kvgen.cache.policies import find_policy
from kvgen.engine.prompt import check_fits, encode
from kvgen.errors import InputError, UsageError
from kvgen.machine import load_average
from kvgen.measure.clock import Clock, clock_for
from kvgen.measure.compare import ComparisonRun, Track
from kvgen.measure.comparison_records import Comparison, PromptSource
from kvgen.measure.contestants import Cached, Compiled, Contestant, Uncached
from kvgen.measure.environment import busy, environment
from kvgen.measure.facts import model_facts
from kvgen.measure.rivals import LibraryCache, LibraryGenerate, LibraryStaticCache
from kvgen.measure.roofline import measured_bandwidth
from kvgen.measure.run import RANDOM_WEIGHTS
from kvgen.measure.tokens import check_vocabulary, read_tokens, tracks_for
from kvgen.models import LoadedModel
from kvgen.models.products import PACKED
from kvgen.models.types import ProgressCallback, no_progress
from kvgen.storage import cache_root

REFERENCE = "kvgen"
RIVALS: dict[str, Callable[[LoadedModel], Contestant]] = {
    "transformers": LibraryCache,
    "transformers-static": LibraryStaticCache,
    "generate": LibraryGenerate,
}
"""What ``--against`` knows."""


class Choice(NamedTuple):
    """A contestant as an option names it: the option (``no_cache``, ``against``, ``cache``,
    ``dtype`` or ``compiled``) and its value.
    """

    option: str
    value: str = ""


@dataclass(frozen=True)
class CompareOptions:
    """What to compare, over which tokens, how often."""

    choices: tuple[Choice, ...]
    prompt: str | None = None
    chat: bool = False
    system: str | None = None
    parse_special: bool = False
    prompt_tokens: int = 128
    new_tokens: int = 32
    depths: tuple[int, ...] = (0,)
    tokens: Path | None = None
    repetitions: int = 5
    warmup: bool = True
    force: bool = False
    """Load also where the memory that is free does not suffice."""


def check_choices(choices: Sequence[Choice]) -> None:
    """Raise ``UsageError`` for an unknown or repeated contestant, before anything is loaded."""
    for choice in choices:
        if choice.option == "against" and choice.value not in RIVALS:
            raise UsageError(
                f"--against {choice.value}: unknown; choose one of {', '.join(RIVALS)}"
            )
        if choice.option == "cache":
            find_policy(choice.value)
    if len(set(choices)) < len(choices):
        raise UsageError("a contestant is named twice; name each once")


def prepare(
    loaded: LoadedModel,
    options: CompareOptions,
    load_in: Callable[[str], LoadedModel],
    clock: Clock | None = None,
    progress: ProgressCallback = no_progress,
    load_plain: Callable[[], LoadedModel] | None = None,
) -> ComparisonRun:
    """Everything before the first measurement; ``load_in`` loads the model in another dtype,
    ``load_plain`` with its weights as they are, for a compiled step and for the library's own ways.

    Raises ``InputError`` if the tokens do not fit the model.
    """
    check_choices(options.choices)
    load_before = load_average()
    # Set, not only read: libraries that ask at other times then see the same number.
    torch.set_num_threads(torch.get_num_threads())
    clock = clock or clock_for(loaded.device)
    begin = clock.now()
    tracks, source = _tracks(loaded, options)
    tokenize_s = clock.now() - begin if options.tokens is None else 0.0
    new_tokens = len(tracks[0].new_ids) if tracks[0].new_ids else options.new_tokens
    for track in tracks:
        depth = len(track.prefix)
        _check_fits(depth, len(track.ids) - depth, new_tokens, loaded)
    check_vocabulary(tracks, int(loaded.config.vocab_size))

    @cache
    def plain() -> LoadedModel:
        return load_plain() if load_plain and PACKED in loaded.products.values() else loaded

    def contestant(choice: Choice) -> Contestant:
        if choice.option == "compiled":
            return Compiled(plain(), f"{REFERENCE} compiled", progress)
        if choice.option == "against":  # the library's own ways, on weights as it loads them
            return RIVALS[choice.value](plain())
        return _contestant(choice, loaded, load_in)

    reference = Cached(loaded, REFERENCE)
    contestants = [reference, *(contestant(choice) for choice in options.choices)]
    bandwidth = measured_bandwidth(loaded.device, torch.get_num_threads(), cache_root())
    empty = KVCache(specs_for(loaded.model))
    record = Comparison(
        model=model_facts(loaded, reference.weights.total, empty),
        environment=environment(reference.forward, loaded, bandwidth),
        random_weights=loaded.source.kind == "random weights",
        prompt=options.prompt or "",
        prompt_source=source,
        tokenize_s=tokenize_s,
        new_tokens=new_tokens,
        depths=[len(track.prefix) for track in tracks],
        repetitions=options.repetitions,
        warmup=options.warmup,
        contestants=[contestant.facts for contestant in contestants],
    )
    record.environment.load_average = load_before
    if record.random_weights:
        record.notes.append(RANDOM_WEIGHTS)
    warning = busy(record.environment)
    record.warnings += [] if warning is None else [warning]
    return ComparisonRun(contestants, tracks, record, clock)


def _check_fits(depth: int, prompt_tokens: int, new_tokens: int, loaded: LoadedModel) -> None:
    try:
        check_fits(depth + prompt_tokens, new_tokens, loaded.context_limit)
    except InputError as error:
        if not depth:
            raise
        raise InputError(f"at depth {depth:,}, its tokens counted as prompt: {error}") from error


def _tracks(loaded: LoadedModel, options: CompareOptions) -> tuple[list[Track], PromptSource]:
    """The tokens, and where they come from."""
    if options.tokens is not None:
        return read_tokens(options.tokens), "tokens"
    if options.prompt is None:
        for depth in options.depths:  # before a text of that length is made
            _check_fits(depth, options.prompt_tokens, options.new_tokens, loaded)
        tracks = tracks_for(loaded.tokenizer, None, options.prompt_tokens, options.depths)
        return tracks, "built-in"
    given = (options.prompt, options.chat, options.system, options.parse_special)
    ids = encode(loaded.tokenizer, *given)
    return tracks_for(loaded.tokenizer, ids, 0, options.depths), "given"


def _contestant(
    choice: Choice, loaded: LoadedModel, load_in: Callable[[str], LoadedModel]
) -> Contestant:
    if choice.option == "no_cache":
        return Uncached(loaded)
    if choice.option == "cache":
        return Cached(loaded, f"{REFERENCE} {choice.value}", choice.value)
    return Cached(load_in(choice.value), f"{REFERENCE} {choice.value}")
