"""``kvgen batch``: many prompts in one run, each result a JSON line as soon as it is there."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvgen.cli import options as shared
from kvgen.cli import values
from kvgen.cli.interrupts import INTERRUPTED, preparing
from kvgen.cli.options import option, use_threads
from kvgen.errors import InputError, KvgenError, UsageError
from kvgen.report.units import visible

if TYPE_CHECKING:
    from kvgen.cli.results import InOrder, ResultFile
    from kvgen.measure.batch import BatchRun
    from kvgen.measure.batch_prompts import BatchOptions
    from kvgen.measure.requests import Rejected, Request
    from kvgen.models import LoadOptions

_TOKENS, _CACHE, _OUTPUT = "Tokens", "Cache and measuring", "Output"


def batch(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE [PART]...",
            help="JSON Lines, each with a prompt or messages, and an id; - reads stdin. With "
            "--merge the files of results follow.",
        ),
    ],
    model: shared.ModelOption = None,
    revision: shared.RevisionOption = None,
    dtype: shared.DtypeOption = shared.Dtype.auto,
    device: shared.DeviceOption = "auto",
    attention: shared.AttentionOption = shared.AttentionMode.auto,
    tune: shared.TuneOption = shared.Tune.auto,
    threads: shared.ThreadsOption = None,
    load_format: shared.LoadFormatOption = shared.LoadFormat.auto,
    trust_remote_code: shared.TrustRemoteCodeOption = False,
    offline: shared.OfflineOption = False,
    force: shared.ForceOption = False,
    max_new_tokens: Annotated[
        int | None,
        option(
            "--max-new-tokens",
            "-n",
            min=1,
            help="At most this many new tokens for each prompt (default 64).",
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
    batch_size: Annotated[
        int,
        option(
            "--batch-size",
            "-b",
            min=1,
            help="Rows that are decoded together.",
            rich_help_panel=_CACHE,
        ),
    ] = 8,
    no_share_prefix: Annotated[
        bool,
        option(
            "--no-share-prefix",
            help="Forward every prompt whole, also where it begins like another.",
            rich_help_panel=_CACHE,
        ),
    ] = False,
    prefix_budget: Annotated[
        str | None,
        option(
            "--prefix-budget",
            help="Memory for stored prefixes, such as 2GiB (default a quarter of what is free).",
            rich_help_panel=_CACHE,
        ),
    ] = None,
    cache: shared.CacheOption = None,
    prefill_chunk: shared.PrefillChunkOption = None,
    output: Annotated[
        Path | None,
        option(
            "--output",
            "-o",
            help="Write there instead of stdout, each result as soon as it is there.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    resume: Annotated[
        bool,
        option(
            "--resume",
            help="Go on with the file of --output; what it holds is not run again.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False,
    shard: Annotated[
        str | None,
        option("--shard", help="Only a part of the prompts: 2/4.", rich_help_panel=_OUTPUT),
    ] = None,
    merge: Annotated[
        bool,
        option(
            "--merge",
            help="Run nothing: put the results of all shards into one, in the prompts' order.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False,
    quiet: shared.QuietOption = False,
    debug: shared.DebugOption = False,
    config: shared.ConfigOption = None,
) -> int:
    """Continue many texts with one load of the model, several at a time.

    What prompts begin with in common is computed once. Every result is one
    JSON line, in the order of the prompts; stderr carries the progress and a
    summary.
    """
    from kvgen.cache.policies import DEFAULT, find_policy
    from kvgen.cli import sharding
    from kvgen.cli.results import results_to
    from kvgen.measure.shards import shard_of

    file, *parts = files
    if parts and not merge:
        raise UsageError(f"one file of prompts at a time, and {parts[0]} is another")
    if merge:
        if shard is not None or resume:
            raise UsageError("--merge runs nothing; leave out --shard and --resume")
        return sharding.merge(_read(file)[0], parts, output)
    find_policy(cache or DEFAULT)
    budget = None if prefix_budget is None else values.size("--prefix-budget", prefix_budget)
    if budget is not None and no_share_prefix:
        raise UsageError("--prefix-budget is for shared prefixes; leave out --no-share-prefix")
    chosen, output, device = sharding.choose_shard(shard, file, output, device)
    quiet = quiet or sharding.is_other_rank()
    requests, rejected = _read(file)
    if chosen is not None:
        requests = shard_of(requests, *chosen)
        rejected = rejected if chosen[0] == 1 else []  # to be said once
    results = results_to(output, resume)

    with preparing():
        # The heavy imports start here, once the command line is known to be right.
        from kvgen.engine.sampling import SamplingOptions
        from kvgen.measure.batch_prompts import BatchOptions
        from kvgen.models import LoadOptions

        options = BatchOptions(
            batch_size=batch_size,
            share_prefix=not no_share_prefix,
            prefix_budget=budget,
            max_new_tokens=max_new_tokens,
            chat=chat,
            system=system,
            parse_special=parse_special,
            sampling=SamplingOptions(temperature, top_k, top_p, min_p, repetition_penalty, seed),
            stop=tuple(stop or ()),
            ignore_eos=ignore_eos,
            cache=cache or DEFAULT,
            prefill_chunk=prefill_chunk,
            force=force,
        )
        load = LoadOptions(
            model=model,
            revision=revision,
            dtype=dtype.value,
            device=device,
            attention=attention.value,
            tune=tune.value,
            trust_remote_code=trust_remote_code,
            offline=offline,
            load_format=load_format.value,
        )
        use_threads(threads)
        run = _prepare(load, options, requests, results, quiet)
    rejected = sorted([*rejected, *run.rejected], key=lambda one: one.line or 0)
    for one in rejected:
        print(f"kvgen: {visible(_rejected_text(file, one))}", file=sys.stderr)
    skipped = {one.id for one in run.rejected}
    results.begin([request.id for request in requests if request.id not in skipped])
    code = _show(run, results, quiet)
    if code == 0 and rejected:
        lines = "line was" if len(rejected) == 1 else "lines were"
        raise InputError(f"{len(rejected):,} {lines} skipped; all others are done")
    return code


def _read(file: str) -> tuple[list[Request], list[Rejected]]:
    """The requests, and the lines that hold none. Raises ``InputError`` for no line at all."""
    from kvgen.measure.requests import read_requests

    try:
        if file == "-":
            found = read_requests(sys.stdin.buffer)
        else:
            with Path(file).open("rb") as stream:
                found = read_requests(stream)
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error
    if not any(found):
        name = "stdin" if file == "-" else file
        raise InputError(f"{name} holds no prompts; write a line of JSON for each")
    return found


def _prepare(
    load: LoadOptions,
    options: BatchOptions,
    requests: list[Request],
    results: InOrder | ResultFile,
    quiet: bool,
) -> BatchRun:
    """Everything before the first prefill."""
    from kvgen.cache.policies import find_policy
    from kvgen.cli.progress import loading
    from kvgen.measure.batch import BatchRun
    from kvgen.measure.guard import Demand, check_before_loading
    from kvgen.measure.run import DEFAULT_NEW_TOKENS
    from kvgen.models import load_model

    if not options.force:
        # The prompts' tokens are not known yet; what is known must fit already.
        tokens = options.max_new_tokens or DEFAULT_NEW_TOKENS
        rows = min(options.batch_size, len(requests) or 1)
        demand = Demand(tokens, find_policy(options.cache), 1, rows)
        check_before_loading(load, demand)
    with loading(quiet) as progress:
        return BatchRun(load_model(load, progress), requests, options, results.finished)


def _show(run: BatchRun, results: InOrder | ResultFile, quiet: bool) -> int:
    """Drive the run to its end or to Ctrl-C; returns the exit code."""
    from kvgen.cli.progress import measuring
    from kvgen.cli.streams import error_console
    from kvgen.models.failures import is_out_of_memory
    from kvgen.report.batch import row_line, summary_lines

    code = 0
    summary = run.summary
    out_of_memory: BaseException | None = None
    try:
        # A bar and lines would write over each other on one terminal.
        with measuring(quiet or results.on_terminal) as progress:
            progress("prompts", 0, run.total)
            for result in run.rows():
                results.write(row_line(result))
                rate = summary.tokens_per_s or 0.0
                progress(f"prompts, {rate:.1f} tokens/s", summary.prompts, run.total)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        out_of_memory = error
    except KvgenError:
        with contextlib.suppress(KvgenError):
            results.close()
        raise
    results.close()
    if not quiet:
        with contextlib.suppress(OSError):
            console = error_console()
            for line in summary_lines(summary):
                console.print(line, soft_wrap=True)
            if code == INTERRUPTED:
                console.print(f"interrupted with {run.total - summary.prompts:,} prompts to go")
    if out_of_memory is not None:
        raise InputError(
            f"out of memory after {summary.prompts:,} prompts, whose results stand; a smaller "
            "--batch-size or --prefix-budget needs less, and --resume goes on"
        ) from out_of_memory
    return code


def _rejected_text(file: str, one: Rejected) -> str:
    where = f"{'stdin' if file == '-' else file}:{one.line}"
    return f"{where}: {' '.join(one.reason.split())}"
