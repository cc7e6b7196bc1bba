"""Progress while a model is made ready or measured: on a terminal's stderr only."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvgen.report.units import visible

ProgressCallback = Callable[[str, int, int], None]


@contextmanager
def loading(quiet: bool) -> Iterator[ProgressCallback]:
    """A callback ``(what, done, total)`` that draws a bar while the block runs.

    Without a terminal that can redraw a line each new ``what`` is one plain line, so that a log
    says why it takes long.
    """
    if quiet:
        yield lambda what, done, total: None
        return
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield _say_once()
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from kvgen.cli.streams import error_console

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=error_console(), transient=True) as bar:
        task = bar.add_task("loading the model", total=None)
        yield lambda what, done, total: bar.update(
            task, description=visible(what), completed=done, total=total
        )


@contextmanager
def measuring(quiet: bool) -> Iterator[ProgressCallback]:
    """As ``loading``, with the time left, drawn only when called: never inside a timed region.

    Silent without a terminal.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from kvgen.cli.streams import error_console

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn())
    console = error_console()
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task("measuring", total=None)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=visible(what), completed=done, total=total, refresh=True)

        yield show


def _say_once() -> ProgressCallback:
    said: set[str] = set()

    def say(what: str, done: int, total: int) -> None:
        if what not in said:
            said.add(what)
            print(f"kvgen: {visible(what)}", file=sys.stderr, flush=True)

    return say
