"""``kvgen size``: what a model's cache costs in memory, from its configuration alone."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from kvgen.cli import options as shared
from kvgen.cli import values
from kvgen.cli.options import option
from kvgen.errors import ModelError


class Format(str, Enum):
    """What stdout carries."""

    text = "text"
    json = "json"
    csv = "csv"
    markdown = "markdown"


class AsIf(str, Enum):
    """Another engine's way of storing."""

    kvgen = "kvgen"
    full = "full"


_WHAT, _OUTPUT = "Sizes", "Output"


def size(
    model: Annotated[
        str | None,
        typer.Argument(
            help="An architecture file, a folder, a .gguf file or a Hub id.  "
            "[default: SmolLM2-135M-Instruct]"
        ),
    ] = None,
    context: Annotated[
        str,
        option("--context", help="Tokens; k is 1,024.", rich_help_panel=_WHAT),
    ] = "4k,32k,128k",
    batch: Annotated[
        str, option("--batch", help="Sequences at a time.", rich_help_panel=_WHAT)
    ] = "1",
    kv_dtype: Annotated[
        str | None,
        option(
            "--kv-dtype",
            help="float32, bfloat16, float16, int8, int4; a list (default the checkpoint's).",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    cache: Annotated[
        str | None,
        option(
            "--cache", help="A storage policy, such as window:512,sink:4.", rich_help_panel=_WHAT
        ),
    ] = None,
    budget: Annotated[
        str | None,
        option(
            "--budget",
            help="Memory, such as 24GiB: the longest context and the largest batch that fit.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    prefill_chunk: Annotated[
        int,
        option(
            "--prefill-chunk",
            min=1,
            help="Tokens of a prompt forwarded together, for the working memory in --budget.",
            rich_help_panel=_WHAT,
        ),
    ] = 512,
    as_if: Annotated[
        AsIf,
        option(
            "--as-if", help="full: windows reserved for the whole context.", rich_help_panel=_WHAT
        ),
    ] = AsIf.kvgen,
    ranks: Annotated[
        int,
        option(
            "--ranks",
            min=1,
            help="Shared out over so many by --parallel tensor: the figures of one of them.",
            rich_help_panel=_WHAT,
        ),
    ] = 1,
    revision: shared.RevisionOption = None,
    offline: shared.OfflineOption = False,
    output_format: Annotated[
        Format, option("--format", "-f", help="What stdout carries.", rich_help_panel=_OUTPUT)
    ] = Format.text,
    output: shared.OutputOption = None,
    quiet: shared.QuietOption = False,
    debug: shared.DebugOption = False,
    config: shared.ConfigOption = None,
) -> int:
    """Predict the bytes of a model's KV cache, per token, per context and within a budget.

    Needs no weights: a configuration is enough.
    """
    from kvgen.cli.streams import Output
    from kvgen.measure.architecture import read_architecture
    from kvgen.measure.size import SizeOptions, size_of
    from kvgen.models.types import LoadOptions
    from kvgen.report.size import EXPORTERS

    options = SizeOptions(
        contexts=values.counts("--context", context),
        batches=values.counts("--batch", batch),
        kv_dtypes=tuple(part.strip() for part in kv_dtype.split(",")) if kv_dtype else (),
        cache=cache,
        budget=None if budget is None else values.size("--budget", budget),
        as_if_full=as_if is AsIf.full,
        prefill_chunk=prefill_chunk,
        ranks=ranks,
    )
    target = Output(output)
    found = read_architecture(LoadOptions(model=model, revision=revision, offline=offline))
    try:
        result = size_of(found, options)
    except ModelError as error:  # speaks of the configuration, not of whose it is
        raise ModelError(f"{found.name}: {error}") from error
    target.write(EXPORTERS[output_format.value](result))
    target.close()
    return 0
