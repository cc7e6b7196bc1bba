"""``kvgen generate``: text on stdout while it is produced, its cost per token on stderr."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from kvgen.cli import options as shared
from kvgen.cli.generating import Format, View
from kvgen.cli.interrupts import preparing
from kvgen.cli.options import option, use_threads
from kvgen.cli.parallel import DeviceMap, Parallel, begin, speaks
from kvgen.errors import UsageError
from kvgen.models import ranks

if TYPE_CHECKING:
    from kvgen.measure.run import GenerationOptions, GenerationRun
    from kvgen.models import LoadOptions


class Recompute(str, Enum):
    """How the cost without a cache is found."""

    sampled = "sampled"
    all = "all"
    off = "off"


_TOKENS, _CACHE, _OUTPUT = "Tokens", "Cache and measuring", "Output"


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="Text to continue; - reads it from stdin.")
    ] = None,
    prompt_file: shared.PromptFileOption = None,
    model: shared.ModelOption = None,
    revision: shared.RevisionOption = None,
    dtype: shared.DtypeOption = shared.Dtype.auto,
    device: shared.DeviceOption = "auto",
    attention: shared.AttentionOption = shared.AttentionMode.auto,
    tune: shared.TuneOption = shared.Tune.auto,
    threads: shared.ThreadsOption = None,
    load_format: shared.LoadFormatOption = shared.LoadFormat.auto,
    device_map: shared.DeviceMapOption = DeviceMap.none,
    parallel: shared.ParallelOption = Parallel.none,
    rank_timeout: shared.RankTimeoutOption = ranks.TIMEOUT_S,
    trust_remote_code: shared.TrustRemoteCodeOption = False,
    offline: shared.OfflineOption = False,
    max_new_tokens: Annotated[
        int | None,
        option(
            "--max-new-tokens",
            "-n",
            min=1,
            help="At most this many new tokens (default 64).",
            rich_help_panel=_TOKENS,
        ),
    ] = None,
    temperature: shared.TemperatureOption = 0.0,
    top_k: shared.TopKOption = None,
    top_p: shared.TopPOption = None,
    min_p: shared.MinPOption = None,
    repetition_penalty: shared.RepetitionPenaltyOption = 1.0,
    seed: shared.SeedOption = None,
    stop: shared.StopOption = None,
    ignore_eos: shared.IgnoreEosOption = False,
    chat: shared.ChatOption = False,
    system: shared.SystemOption = None,
    parse_special: shared.ParseSpecialOption = False,
    no_cache: Annotated[
        bool,
        option(
            "--no-cache",
            help="Forward the whole prefix for every token instead.",
            rich_help_panel=_CACHE,
        ),
    ] = False,
    cache: shared.CacheOption = None,
    cache_step: Annotated[
        int | None,
        option(
            "--cache-step",
            min=1,
            help="Tokens that the cache grows by (default 256).",
            rich_help_panel=_CACHE,
        ),
    ] = None,
    compiled: Annotated[
        bool,
        option(
            "--compile",
            help="Compile the decode step. Slow the first time, then kept on disk.",
            rich_help_panel=_CACHE,
        ),
    ] = False,
    force: shared.ForceOption = False,
    prefill_chunk: shared.PrefillChunkOption = None,
    recompute: Annotated[
        Recompute,
        option(
            "--recompute",
            help="Where the uncached forward is run afterwards, for its cost and as the proof.",
            rich_help_panel=_CACHE,
        ),
    ] = Recompute.sampled,
    prompt_cache: shared.PromptCacheOption = None,
    prompt_cache_ro: shared.PromptCacheReadOnlyOption = False,
    warmup: Annotated[
        bool,
        option(
            "--warmup/--no-warmup",
            help="Run both shapes once before timing.",
            rich_help_panel=_CACHE,
        ),
    ] = True,
    output_format: Annotated[
        Format, option("--format", "-f", help="What stdout carries.", rich_help_panel=_OUTPUT)
    ] = Format.text,
    output: shared.OutputOption = None,
    trace: Annotated[
        bool, option("--trace", help="Show every step in the table.", rich_help_panel=_OUTPUT)
    ] = False,
    no_stats: Annotated[bool, option("--no-stats", help="No table.", rich_help_panel=_OUTPUT)] = (
        False
    ),
    quiet: shared.QuietOption = False,
    debug: shared.DebugOption = False,
    config: shared.ConfigOption = None,
) -> int:
    """Continue a text, and show what each token cost with the cache and without it.

    stdout carries the text alone. stderr carries the table: latency, bytes in the
    cache and the cost of the same token without a cache.
    """
    from kvgen.cache.policies import find_policy
    from kvgen.cache.stepwise import in_blocks
    from kvgen.cli.streams import Output, read_prompt

    with preparing():
        spread = begin(parallel, device_map, rank_timeout)
    if no_cache and prefill_chunk is not None:
        raise UsageError("--prefill-chunk needs the cache; leave out --no-cache")
    if prompt_cache is not None and no_cache:
        raise UsageError("--prompt-cache needs the cache; leave out --no-cache")
    if prompt_cache is not None and spread != "none":
        raise UsageError(
            "--prompt-cache is for a model on one device; leave out --parallel and --device-map"
        )
    shared.check_prompt_cache(prompt_cache, prompt_cache_ro)
    policy = policy_text(cache, cache_step, no_cache)
    if compiled:
        if no_cache:
            raise UsageError("--compile is for a step with the cache; leave out --no-cache")
        in_blocks(find_policy(policy), 1)
    text = ranks.shared(lambda: read_prompt(prompt, prompt_file))
    view = View(
        Output(output if speaks() else None),
        output_format,
        trace,
        quiet,
        table=not (quiet or no_stats),
    )

    with preparing():
        # The heavy imports start here, once the command line is known to be right.
        from kvgen.engine.sampling import SamplingOptions
        from kvgen.measure.run import GenerationOptions
        from kvgen.models import LoadOptions

        sampling = SamplingOptions(temperature, top_k, top_p, min_p, repetition_penalty, seed)
        options = GenerationOptions(
            prompt=text,
            max_new_tokens=max_new_tokens,
            chat=chat or system is not None,
            system=system,
            parse_special=parse_special,
            sampling=sampling,
            stop=tuple(stop or ()),
            ignore_eos=ignore_eos,
            cached=not no_cache,
            cache=policy,
            compiled=compiled,
            force=force,
            prefill_chunk=prefill_chunk,
            recompute=recompute.value,
            warmup=warmup,
            prompt_cache=prompt_cache,
            prompt_cache_read_only=prompt_cache_ro,
        )
        load = LoadOptions(
            model=model,
            revision=revision,
            dtype=dtype.value,
            device=device,
            trust_remote_code=trust_remote_code,
            offline=offline,
            attention=attention.value,
            tune="off" if compiled else tune.value,  # a compiled step takes weights as they are
            load_format=load_format.value,
            spread=spread,
        )
        run = prepare(load, options, threads, quiet)
    return view.show(run)


def policy_text(cache: str | None, step: int | None = None, no_cache: bool = False) -> str:
    """The storage policy that the options name, found to be one."""
    from kvgen.cache.policies import DEFAULT, find_policy

    if no_cache and (cache is not None or step is not None):
        raise UsageError("--cache and --cache-step need the cache; leave out --no-cache")
    name = cache or DEFAULT
    if step is not None:
        if name != DEFAULT:
            raise UsageError(f"--cache-step is for --cache {DEFAULT}, not for {name}")
        name = f"{DEFAULT}:{step}"
    find_policy(name)
    return name


def prepare(
    load: LoadOptions, options: GenerationOptions, threads: int | None, quiet: bool
) -> GenerationRun:
    """Everything before the first token."""
    from kvgen.cache.policies import find_policy
    from kvgen.cli.progress import loading
    from kvgen.measure.guard import Demand, check_before_loading, check_heads
    from kvgen.measure.run import DEFAULT_NEW_TOKENS, GenerationRun
    from kvgen.models import load_model

    use_threads(threads)
    check_heads(load)
    if not options.force:
        # The prompt's tokens are not known yet; what is known must fit already.
        policy = find_policy(options.cache) if options.cached else None
        demand = Demand(options.max_new_tokens or DEFAULT_NEW_TOKENS, policy, chunk=1)
        check_before_loading(load, demand)
    with loading(quiet) as progress:
        return GenerationRun(load_model(load, progress), options, progress=progress)
