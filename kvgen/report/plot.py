"""A comparison drawn to a file: SVG, PNG, or an HTML page with the drawing and the tables.

matplotlib is the optional extra ``kvgen[plot]``. Curves differ in line style and marker as well as
in shade, so that a print in black and white can be read.
"""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvgen.errors import UsageError
from kvgen.report.exporters import remarks, series
from kvgen.report.rows import Titled, grids, header
from kvgen.storage import write_atomically

SUFFIXES = (".svg", ".png", ".html")
_STYLES = ("-", "--", ":", "-.")
_MARKERS = "os^Dvx*P"
_SHADES = ("#000000", "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#777777")
_HINT = "plots need matplotlib; run: pip install 'kvgen[plot]'"


def check_plot(path: Path) -> None:
    """Raise ``UsageError`` for a suffix that cannot be drawn and when matplotlib is missing."""
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"cannot plot to {path}; end it in {', '.join(SUFFIXES)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError(_HINT) from error


def draw(path: Path, runs: Sequence[Titled]) -> None:
    """Draw to ``path``, whole or not at all. Raises ``UsageError`` and ``OSError``."""
    check_plot(path)
    figure = _figure(runs)
    form = "png" if path.suffix.lower() == ".png" else "svg"
    out = io.BytesIO()
    figure.savefig(out, format=form, dpi=150)
    content = out.getvalue()
    if path.suffix.lower() == ".html":
        content = _page(runs, content.decode("utf-8")).encode("utf-8")
    write_atomically(path, content)


def _figure(runs: Sequence[Titled]) -> Any:
    # The object interface: no windows, no state shared with whoever else draws.
    from matplotlib.figure import Figure

    swept = any(len(run.record.rows) > 1 for run in runs)
    figure = Figure(figsize=(11 if swept else 7.5, 4.8), layout="constrained")
    panels = figure.subplots(1, 2 if swept else 1, squeeze=False)[0]
    _steps(panels[0], runs)
    if swept:
        _depths(panels[1], runs)
    panels[0].legend(fontsize="small")
    figure.suptitle("\n".join(header(run)[0] for run in runs), fontsize="medium", parse_math=False)
    return figure


def _steps(axes: Any, runs: Sequence[Titled]) -> None:
    """Time per step against position; points that are not neighbours are not joined."""
    number = 0
    for run in runs:
        for one in series(run.record):
            xs, ys = _with_gaps(one.positions, [second * 1e3 for second in one.seconds])
            label = f"{run.title}: {one.name}" if run.title else one.name
            axes.plot(xs, ys, label=label, **_style(number), markevery=max(1, len(xs) // 8))
            number += 1
    _log_time(axes)
    axes.set_xlabel("position (tokens)")
    axes.set_ylabel("time per step (ms)")
    axes.grid(True, which="both", linewidth=0.3)


def _depths(axes: Any, runs: Sequence[Titled]) -> None:
    """Median TPOT against depth, with its spread."""
    number = 0
    for run in runs:
        for index in range(len(run.record.contestants)):
            points = [
                (row.depth, value.median * 1e3, value.spread * 1e3)
                for row in run.record.rows
                if (value := row.results[index].tpot_s) is not None
            ]
            if points:
                xs, ys, errors = zip(*points, strict=True)
                axes.errorbar(xs, ys, yerr=errors, capsize=3, **_style(number))
            number += 1
    _log_time(axes)
    axes.set_xlabel("depth (tokens already in the cache)")
    axes.set_ylabel("time per output token (ms), median and spread")
    axes.grid(True, which="both", linewidth=0.3)


def _log_time(axes: Any) -> None:
    """A logarithmic time axis with plain numbers."""
    from matplotlib.ticker import FuncFormatter

    axes.set_yscale("log")
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(plain)
    axes.yaxis.set_minor_formatter(plain)


def _style(number: int) -> dict[str, Any]:
    return {
        "linestyle": _STYLES[number % len(_STYLES)],
        "marker": _MARKERS[number % len(_MARKERS)],
        "color": _SHADES[number % len(_SHADES)],
        "markersize": 5,
        "markerfacecolor": "white",
        "linewidth": 1.4,
    }


def _with_gaps(xs: Sequence[int], ys: Sequence[float]) -> tuple[list[float], list[float]]:
    """The points with a hole wherever positions jump, so that depths are not joined by a line."""
    out_x: list[float] = []
    out_y: list[float] = []
    for x, y in zip(xs, ys, strict=True):
        if out_x and x - out_x[-1] > 1:
            out_x.append(float("nan"))
            out_y.append(float("nan"))
        out_x.append(float(x))
        out_y.append(y)
    return out_x, out_y


def _page(runs: Sequence[Titled], svg: str) -> str:
    """One self-contained page."""
    parts = [f"<p>{html.escape(line)}</p>" for run in runs for line in header(run)]
    parts.append(svg[svg.index("<svg") :])
    for grid in grids(runs):
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in grid.heads)
        rows = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
            for row in grid.rows
        )
        parts.append(f"<table><tr>{head}</tr>{rows}</table>")
    for run in runs:
        for heading, sentences in remarks(run.record):
            title = f"{run.title}: {heading}" if len(runs) > 1 else heading
            items = "".join(f"<li>{html.escape(item)}</li>" for item in sentences)
            parts.append(f"<h2>{html.escape(title)}</h2><ul>{items}</ul>")
    return _HTML.format(body="\n".join(parts))


_HTML = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>kvgen compare</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em }}
svg {{ max-width: 100%; height: auto }}
table {{ border-collapse: collapse; margin: 1em 0 }}
td, th {{ border-bottom: 1px solid #bbb; padding: .2em .8em; text-align: left }}
</style></head><body>
<h1>kvgen compare</h1>
{body}
</body></html>
"""
