"""``kvgen cache``: make, look at and check the files that keep a prompt's cache."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvgen.cli import options as shared
from kvgen.cli.generate import policy_text, prepare
from kvgen.cli.interrupts import preparing
from kvgen.cli.options import use_threads
from kvgen.cli.parallel import one_process
from kvgen.errors import DisagreementError, KvgenError
from kvgen.report.units import visible

cache_app = typer.Typer(
    help="Make, look at and check files that keep a prompt's cache.", no_args_is_help=True
)

FileArgument = Annotated[Path, typer.Argument(help="A file that --prompt-cache can read.")]


@cache_app.command()
def save(
    prompt: Annotated[str, typer.Argument(help="Text to compute; - reads it from stdin.")],
    file: Annotated[Path, typer.Argument(help="The file to keep its cache in.")],
    model: shared.ModelOption = None,
    revision: shared.RevisionOption = None,
    dtype: shared.DtypeOption = shared.Dtype.auto,
    device: shared.DeviceOption = "auto",
    attention: shared.AttentionOption = shared.AttentionMode.auto,
    tune: shared.TuneOption = shared.Tune.auto,
    threads: shared.ThreadsOption = None,
    trust_remote_code: shared.TrustRemoteCodeOption = False,
    offline: shared.OfflineOption = False,
    chat: shared.ChatOption = False,
    system: shared.SystemOption = None,
    parse_special: shared.ParseSpecialOption = False,
    cache: shared.CacheOption = None,
    force: shared.ForceOption = False,
    quiet: shared.QuietOption = False,
    debug: shared.DebugOption = False,
    config: shared.ConfigOption = None,
) -> int:
    """Compute a prompt's cache and keep it in a file.

    What the file holds of the prompt already is not computed again.
    """
    from kvgen.cli.streams import error_console, read_prompt

    one_process()
    shared.check_prompt_cache(file, False)
    policy = policy_text(cache)
    text = read_prompt(prompt, None)
    with preparing():
        # The heavy imports start here, once the command line is known to be right.
        from kvgen.measure.run import GenerationOptions
        from kvgen.models import LoadOptions

        options = GenerationOptions(
            prompt=text,
            max_new_tokens=1,
            chat=chat or system is not None,
            system=system,
            parse_special=parse_special,
            cache=policy,
            force=force,
            recompute="off",
            prompt_cache=file,
        )
        load = LoadOptions(
            model=model,
            revision=revision,
            dtype=dtype.value,
            device=device,
            trust_remote_code=trust_remote_code,
            offline=offline,
            attention=attention.value,
            tune=tune.value,
        )
        run = prepare(load, options, threads, quiet)
    for _ in run.pieces():
        pass
    record = run.finish()
    if not quiet and record.reuse is not None:
        from kvgen.report.receipt import receipt_lines

        for line in receipt_lines(record.reuse, record.kept):
            error_console().print(visible(line))
    if record.kept is not None and record.kept.error is not None:
        raise KvgenError(f"{file} was not written and is as it was: {record.kept.error}")
    return 0


@cache_app.command()
def show(
    file: FileArgument,
    debug: shared.DebugOption = False,
    config: shared.ConfigOption = None,
) -> int:
    """Say what a file holds: tokens, layers, bytes and fingerprint. Loads no model."""
    from kvgen.cli.streams import Output
    from kvgen.measure.cache_file import describe_file
    from kvgen.report.receipt import file_lines

    output = Output(None)
    output.write("".join(f"{line}\n" for line in file_lines(describe_file(file))))
    return 0


@cache_app.command()
def verify(
    file: FileArgument,
    model: shared.ModelOption = None,
    revision: shared.RevisionOption = None,
    dtype: shared.DtypeOption = shared.Dtype.auto,
    device: shared.DeviceOption = "auto",
    attention: shared.AttentionOption = shared.AttentionMode.auto,
    tune: shared.TuneOption = shared.Tune.auto,
    threads: shared.ThreadsOption = None,
    trust_remote_code: shared.TrustRemoteCodeOption = False,
    offline: shared.OfflineOption = False,
    cache: shared.CacheOption = None,
    quiet: shared.QuietOption = False,
    debug: shared.DebugOption = False,
    config: shared.ConfigOption = None,
) -> int:
    """Compute a file's tokens again and hold what it stores against that.

    Exit code 5 if they disagree.
    """
    from kvgen.cache.disk import open_cache_file
    from kvgen.cli.streams import Output

    one_process()
    policy = policy_text(cache)
    open_cache_file(file)  # what is none is refused before the model is loaded
    output = Output(None)
    # The heavy imports start here, once the command line is known to be right.
    from kvgen.cli.progress import loading
    from kvgen.measure.file_check import check_file
    from kvgen.models import LoadOptions, load_model
    from kvgen.report.receipt import file_check_lines

    use_threads(threads)
    load = LoadOptions(
        model=model,
        revision=revision,
        dtype=dtype.value,
        device=device,
        trust_remote_code=trust_remote_code,
        offline=offline,
        attention=attention.value,
        tune=tune.value,
    )
    with loading(quiet) as progress:
        found = check_file(file, load_model(load, progress), policy)
    output.write("".join(f"{line}\n" for line in file_check_lines(found)))
    if not found.sound:
        raise DisagreementError(f"{file} does not hold what this model computes for its tokens")
    return 0
