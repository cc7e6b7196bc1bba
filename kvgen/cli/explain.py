"""``kvgen explain``: what the cache does, shown on a few tokens of the user's own model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvgen.cli import options as shared
from kvgen.cli.options import option, use_threads
from kvgen.cli.parallel import one_process
from kvgen.errors import DisagreementError, UsageError

_OUTPUT = "Output"


def explain(
    prompt: Annotated[
        str | None, typer.Argument(help="Text to start from; - reads it from stdin.")
    ] = None,
    prompt_file: shared.PromptFileOption = None,
    model: shared.ModelOption = None,
    revision: shared.RevisionOption = None,
    dtype: shared.DtypeOption = shared.Dtype.auto,
    device: shared.DeviceOption = "auto",
    threads: shared.ThreadsOption = None,
    trust_remote_code: shared.TrustRemoteCodeOption = False,
    offline: shared.OfflineOption = False,
    max_new_tokens: Annotated[
        int, option("--max-new-tokens", "-n", min=1, max=64, help="Tokens to walk through.")
    ] = 4,
    layer: Annotated[
        int | None,
        option("--layer", min=0, help="The layer to look into (default one that shows most)."),
    ] = None,
    chat: shared.ChatOption = False,
    parse_special: shared.ParseSpecialOption = False,
    timings: Annotated[
        bool,
        option("--timings/--no-timings", help="Measure both paths, and this machine's limits."),
    ] = True,
    output_format: shared.TextOrJsonOption = shared.TextOrJson.text,
    html: Annotated[
        Path | None,
        option("--html", help="Also write a page to look at.", rich_help_panel=_OUTPUT),
    ] = None,
    output: shared.OutputOption = None,
    quiet: shared.QuietOption = False,
    debug: shared.DebugOption = False,
    config: shared.ConfigOption = None,
) -> int:
    """Show what the cache stores, reads and saves at every token, and prove it.

    Greedy, on your own model and prompt. Exit code 5 if a stored pair changed
    or the two paths disagree.
    """
    from kvgen.cli.streams import Output, read_prompt

    one_process()
    if html is not None and output is not None and html.resolve() == output.resolve():
        raise UsageError("--html and --output name one file; name two")
    text = read_prompt(prompt, prompt_file)
    destination = Output(output)
    page = None if html is None else Output(html)

    # The heavy imports start here, once the command line is known to be right.
    from kvgen.cli.progress import loading
    from kvgen.measure.explain import ExplainOptions, ExplanationRun
    from kvgen.models import LoadOptions, load_model
    from kvgen.report.document import to_json
    from kvgen.report.explain_page import explanation_document, explanation_page
    from kvgen.report.explain_text import explanation_text

    use_threads(threads)
    load = LoadOptions(
        model=model,
        revision=revision,
        dtype=dtype.value,
        device=device,
        trust_remote_code=trust_remote_code,
        offline=offline,
    )
    with loading(quiet) as progress:
        loaded = load_model(load, progress)
    options = ExplainOptions(text, max_new_tokens, layer, chat, timings, parse_special)
    record = ExplanationRun(loaded, options).explain()

    if output_format is shared.TextOrJson.text:
        destination.write(explanation_text(record))
    else:
        destination.write(to_json(explanation_document(record), indent=2) + "\n")
    destination.close()
    if page is not None:
        page.write(explanation_page(record))
        page.close()
    if record.changed:
        stage, index = record.changed[0]
        raise DisagreementError(f"stage {stage} changed earlier pairs of layer {index}")
    if record.disagreeing or (record.training is not None and not record.training.agrees):
        raise DisagreementError("cached and uncached logits disagree")
    return 0
