"""``kvgen compare``: the same tokens through the cache and through its rivals, side by side."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from kvgen.cli import options as shared
from kvgen.cli import values
from kvgen.cli.interrupts import preparing
from kvgen.cli.options import option
from kvgen.cli.ordered import in_order
from kvgen.cli.parallel import DeviceMap, Parallel, begin, speaks
from kvgen.errors import UsageError
from kvgen.models import ranks


class Format(str, Enum):
    """What stdout carries."""

    text = "text"
    json = "json"
    jsonl = "jsonl"
    csv = "csv"
    markdown = "markdown"


_WHO, _TOKENS, _HOW, _GATES, _OUTPUT = (
    "Contestants",
    "Tokens",
    "Measuring",
    "Gates (exit code 6)",
    "Output",
)


def compare(
    context: typer.Context,
    prompt: Annotated[
        str | None,
        typer.Argument(help="Text to run over; - reads it from stdin (default a built-in text)."),
    ] = None,
    prompt_file: shared.PromptFileOption = None,
    no_cache: Annotated[
        bool,
        option(
            "--no-cache",
            help="The whole prefix again for every token. Assumed if no other is named.",
            rich_help_panel=_WHO,
        ),
    ] = False,
    against: Annotated[
        list[str] | None,
        option(
            "--against",
            help="transformers, transformers-static or generate; repeatable.",
            rich_help_panel=_WHO,
        ),
    ] = None,
    cache: Annotated[
        list[str] | None,
        option("--cache", help="Another storage of kvgen's; repeatable.", rich_help_panel=_WHO),
    ] = None,
    compiled: Annotated[
        bool,
        option(
            "--compile",
            help="kvgen's cache with a compiled decode step.",
            rich_help_panel=_WHO,
        ),
    ] = False,
    dtype: Annotated[
        list[shared.Dtype] | None,
        option(
            "--dtype",
            help="The reference's arithmetic; given again, another contestant's (default auto).",
            rich_help_panel=_WHO,
        ),
    ] = None,
    model: shared.ModelOption = None,
    revision: shared.RevisionOption = None,
    load_format: shared.LoadFormatOption = shared.LoadFormat.auto,
    device: shared.DeviceOption = "auto",
    device_map: shared.DeviceMapOption = DeviceMap.none,
    parallel: shared.ParallelOption = Parallel.none,
    rank_timeout: shared.RankTimeoutOption = ranks.TIMEOUT_S,
    attention: shared.AttentionOption = shared.AttentionMode.auto,
    tune: shared.TuneOption = shared.Tune.auto,
    threads: shared.ThreadsOption = None,
    trust_remote_code: shared.TrustRemoteCodeOption = False,
    offline: shared.OfflineOption = False,
    max_new_tokens: Annotated[
        int, option("--max-new-tokens", "-n", min=1, help="New tokens.", rich_help_panel=_TOKENS)
    ] = 32,
    prompt_tokens: Annotated[
        int | None,
        option(
            "--prompt-tokens",
            min=1,
            help="Length of the built-in prompt (default 128).",
            rich_help_panel=_TOKENS,
        ),
    ] = None,
    chat: shared.ChatOption = False,
    system: shared.SystemOption = None,
    parse_special: shared.ParseSpecialOption = False,
    depth: Annotated[
        str | None,
        option(
            "--depth",
            help="Tokens cached before timing starts: 0,512 or 128-4096*2 (default 0).",
            rich_help_panel=_TOKENS,
        ),
    ] = None,
    tokens: Annotated[
        Path | None,
        option(
            "--tokens",
            help="Replay the ids in a file of --save-tokens, or of --export FILE.json.",
            rich_help_panel=_TOKENS,
        ),
    ] = None,
    save_tokens: Annotated[
        Path | None,
        option("--save-tokens", help="Write the ids that were run.", rich_help_panel=_TOKENS),
    ] = None,
    repetitions: Annotated[
        int, option("--repetitions", "-r", min=1, help="Runs each.", rich_help_panel=_HOW)
    ] = 5,
    warmup: Annotated[
        bool,
        option("--warmup/--no-warmup", help="Run both shapes before timing.", rich_help_panel=_HOW),
    ] = True,
    fail_under_speedup: Annotated[
        float | None,
        option(
            "--fail-under-speedup",
            min=0,
            help="Over the first contestant named, at every depth.",
            rich_help_panel=_GATES,
        ),
    ] = None,
    max_tpot_ms: Annotated[
        float | None,
        option("--max-tpot-ms", min=0, help="Time per output token.", rich_help_panel=_GATES),
    ] = None,
    max_ttft_ms: Annotated[
        float | None,
        option("--max-ttft-ms", min=0, help="Time to first token.", rich_help_panel=_GATES),
    ] = None,
    max_kv_bytes: Annotated[
        str | None,
        option("--max-kv-bytes", help="Peak cache, such as 40MiB.", rich_help_panel=_GATES),
    ] = None,
    baseline: Annotated[
        Path | None,
        option("--baseline", help="An earlier result, saved as JSON.", rich_help_panel=_GATES),
    ] = None,
    max_regression: Annotated[
        str | None,
        option(
            "--max-regression",
            help="TPOT over the baseline's, such as 10%, if beyond the spread as well.",
            rich_help_panel=_GATES,
        ),
    ] = None,
    output_format: Annotated[
        Format, option("--format", "-f", help="What stdout carries.", rich_help_panel=_OUTPUT)
    ] = Format.text,
    export: Annotated[
        list[Path] | None,
        option(
            "--export",
            help="Write to FILE.json, .jsonl, .csv, .md or .txt after every depth; repeatable.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    plot: Annotated[
        list[Path] | None,
        option(
            "--plot",
            help="Draw to FILE.svg, .png or .html; repeatable. Needs matplotlib.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    steps: Annotated[
        bool, option("--steps", help="Show every step in a table.", rich_help_panel=_OUTPUT)
    ] = False,
    chart: Annotated[
        bool, option("--chart/--no-chart", help="Draw in the text.", rich_help_panel=_OUTPUT)
    ] = True,
    force: shared.ForceOption = False,
    quiet: shared.QuietOption = False,
    debug: shared.DebugOption = False,
    config: shared.ConfigOption = None,
) -> int:
    """Run the same tokens with the cache and without it, and prove that they agree.

    The reference, kvgen's cache, chooses the tokens once; every contestant is
    led through the same ids, in turn with the others.
    """
    from kvgen.cli.streams import read_prompt

    with preparing():
        spread = begin(parallel, device_map, rank_timeout)
    dtypes = [one.value for one in dtype or [shared.Dtype.auto]]
    lists = {
        "no_cache": [""] if no_cache else [],
        "against": list(against or []),
        "cache": list(cache or []),
        "compiled": [""] if compiled else [],
        "dtype": dtypes,
    }
    named = in_order(context, lists)
    named.remove(("dtype", dtypes[0]))  # the reference's own
    if tokens is not None:
        own = (prompt, prompt_file, prompt_tokens, depth, system)
        if any(one is not None for one in own) or chat:
            raise UsageError("--tokens brings its own prompt and depths; leave those options out")
    if prompt_tokens is not None and (prompt is not None or prompt_file is not None):
        raise UsageError("--prompt-tokens cuts the built-in text; leave it out with a prompt")
    if (chat or system is not None) and prompt is None and prompt_file is None:
        raise UsageError("--chat and --system need a prompt")
    if (baseline is None) != (max_regression is None):
        raise UsageError("--baseline FILE and --max-regression 10% belong together")
    given = prompt is not None or prompt_file is not None
    text = ranks.shared(lambda: read_prompt(prompt, prompt_file)) if given else None
    depths = values.depths("0" if depth is None else depth)
    kv_bytes = None if max_kv_bytes is None else values.size("--max-kv-bytes", max_kv_bytes)
    allowed = None if max_regression is None else values.part("--max-regression", max_regression)

    from kvgen.cli.comparing import Comparing, Targets
    from kvgen.report.saved import read_comparison

    targets = Targets(output_format.value, tuple(export or ()), tuple(plot or ()), save_tokens)
    targets = targets if speaks() else Targets(output_format.value)
    targets.check()
    before = None if baseline is None else read_comparison(baseline)

    # The heavy imports start here, once the command line is known to be right.
    from kvgen.measure.gates import GateOptions
    from kvgen.measure.setup import Choice, CompareOptions, check_choices
    from kvgen.models import LoadOptions

    choices = tuple(Choice(name, value) for name, value in named) or (Choice("no_cache"),)
    check_choices(choices)
    options = CompareOptions(
        choices=choices,
        prompt=text,
        chat=chat or system is not None,
        system=system,
        parse_special=parse_special,
        prompt_tokens=prompt_tokens or 128,
        new_tokens=max_new_tokens,
        depths=depths,
        tokens=tokens,
        repetitions=repetitions,
        warmup=warmup,
        force=force,
    )
    load = LoadOptions(
        model=model,
        revision=revision,
        dtype=dtypes[0],
        device=device,
        trust_remote_code=trust_remote_code,
        offline=offline,
        attention=attention.value,
        tune=tune.value,
        load_format=load_format.value,
        spread=spread,
    )
    gates = GateOptions(fail_under_speedup, max_tpot_ms, max_ttft_ms, kv_bytes, before, allowed)
    return Comparing(load, options, gates, targets, threads, quiet, steps, chart).run()
