"""``kvgen report``: saved results in another format, or side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvgen.cli import options as shared
from kvgen.cli.compare import Format
from kvgen.cli.options import option
from kvgen.errors import UsageError


def report(
    files: Annotated[
        list[Path], typer.Argument(help="Results that kvgen compare saved as JSON.", min=1)
    ],
    output_format: Annotated[Format, option("--format", "-f", help="What stdout carries.")] = (
        Format.text
    ),
    export: Annotated[
        list[Path] | None,
        option("--export", help="Write to FILE.json, .jsonl, .csv, .md or .txt; repeatable."),
    ] = None,
    plot: Annotated[
        list[Path] | None,
        option("--plot", help="Draw to FILE.svg, .png or .html; repeatable. Needs matplotlib."),
    ] = None,
    steps: Annotated[bool, option("--steps", help="Show every step in a table.")] = False,
    chart: Annotated[bool, option("--chart/--no-chart", help="Draw in the text.")] = True,
    debug: shared.DebugOption = False,
    config: shared.ConfigOption = None,
) -> int:
    """Show saved results again, in any format; several stand side by side."""
    from kvgen.cli.comparing import Targets
    from kvgen.cli.streams import Output
    from kvgen.report.exporters import EXPORTERS, text
    from kvgen.report.rows import Titled
    from kvgen.report.saved import read_comparison

    targets = Targets(output_format.value, tuple(export or ()), tuple(plot or ()))
    targets.check()
    sources = {path.absolute() for path in files}
    if len({path.resolve() for path in files}) < len(files):
        raise UsageError("a result is named twice; name each once")
    clash = [path for path in (*targets.exports, *targets.plots) if path.absolute() in sources]
    if clash:
        raise UsageError(f"{clash[0]} is one of the results to show; write to another file")
    titles = [""] if len(files) == 1 else [path.stem for path in files]
    if len(set(titles)) < len(titles):
        titles = [str(path) for path in files]
    runs = [Titled(title, read_comparison(p)) for title, p in zip(titles, files, strict=True)]
    targets.write(runs)
    targets.draw(runs)
    form = output_format.value
    shown = text(runs, steps, chart) if form == "text" else EXPORTERS[form](runs)
    Output(None).write(shown)
    return 0
