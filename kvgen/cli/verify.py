"""``kvgen verify``: the proof that the cache changes nothing, check by check, on one model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvgen.cli import options as shared
from kvgen.cli.options import option, use_threads
from kvgen.cli.parallel import DeviceMap, Parallel, begin, speaks
from kvgen.errors import DisagreementError, UsageError
from kvgen.models import ranks

if TYPE_CHECKING:
    from kvgen.cli.streams import Output
    from kvgen.measure.verification import VerificationRun


def verify(
    named: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="The same as --model.")
    ] = None,
    model: shared.ModelOption = None,
    revision: shared.RevisionOption = None,
    dtype: shared.DtypeOption = shared.Dtype.auto,
    device: shared.DeviceOption = "auto",
    device_map: shared.DeviceMapOption = DeviceMap.none,
    parallel: shared.ParallelOption = Parallel.none,
    rank_timeout: shared.RankTimeoutOption = ranks.TIMEOUT_S,
    attention: shared.AttentionOption = shared.AttentionMode.auto,
    tune: shared.TuneOption = shared.Tune.auto,
    threads: shared.ThreadsOption = None,
    trust_remote_code: shared.TrustRemoteCodeOption = False,
    offline: shared.OfflineOption = False,
    quick: Annotated[
        bool, option("--quick", help="Short sequences only: seconds on a small model.")
    ] = False,
    output_format: shared.TextOrJsonOption = shared.TextOrJson.text,
    output: shared.OutputOption = None,
    quiet: shared.QuietOption = False,
    debug: shared.DebugOption = False,
    config: shared.ConfigOption = None,
) -> int:
    """Prove on a model that cached and uncached forwards agree, and say where they do not.

    Runs the model through the cache in every way it can be used and holds the
    logits against one uncached forward. Exit code 5 if any check fails.
    """
    from kvgen.cli.streams import Output

    if named is not None and model is not None and named != model:
        raise UsageError(f"two models are named, {named} and {model}; name one")
    spread = begin(parallel, device_map, rank_timeout)
    destination = Output(output if speaks() else None)

    # The heavy imports start here, once the command line is known to be right.
    from kvgen.cli.progress import loading
    from kvgen.measure.guard import check_heads
    from kvgen.measure.verification import VerificationRun
    from kvgen.models import LoadOptions, load_model

    use_threads(threads)
    load = LoadOptions(
        model=named or model,
        revision=revision,
        dtype=dtype.value,
        device=device,
        trust_remote_code=trust_remote_code,
        offline=offline,
        spread=spread,
        attention=attention.value,
        tune=tune.value,
    )
    check_heads(load)
    with loading(quiet) as progress:
        run = VerificationRun(load_model(load, progress), quick)
    return _show(run, destination, output_format)


def _show(run: VerificationRun, destination: Output, form: shared.TextOrJson) -> int:
    """Drive the checks to their end, showing each as it finishes; returns the exit code."""
    from kvgen.report import verify_text
    from kvgen.report.document import to_json

    as_text = form is shared.TextOrJson.text
    if as_text:
        _lines(destination, verify_text.head_lines(run.record))
    for outcome in run.outcomes():
        if as_text:
            _lines(destination, verify_text.outcome_lines(outcome))
    if as_text:
        _lines(destination, ["", verify_text.tail_line(run.record)])
    else:
        document = verify_text.verification_document(run.record)
        destination.write(to_json(document, indent=2) + "\n")
    destination.close()
    failed = run.record.failed
    if failed:
        names = ", ".join(outcome.check for outcome in failed)
        raise DisagreementError(f"the cache is wrong for {run.record.model.name}: {names}")
    return 0


def _lines(destination: Output, lines: list[str]) -> None:
    destination.write("".join(line + "\n" for line in lines))
