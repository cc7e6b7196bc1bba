"""Progress while a model is made ready or measured: on a terminal's stderr only."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from kvgen.models.types import ProgressCallback, no_progress
from kvgen.report.units import visible


@contextmanager
def loading(quiet: bool) -> Iterator[ProgressCallback]:
    """A callback ``(what, done, total)`` that draws a bar while the block runs.

    Without a terminal that can redraw a line each new ``what`` is one plain line, so that a log
    says why it takes long.
    """
    if quiet:
        yield no_progress
    elif not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield _say_once()
    else:
        with _bar("loading the model", by_itself=True) as show:
            yield show


@contextmanager
def measuring(quiet: bool) -> Iterator[ProgressCallback]:
    """As ``loading``, with the time left, drawn only when called: never inside a timed region.

    Silent without a terminal.
    """
    if quiet or not sys.stderr.isatty():
        yield no_progress
    else:
        with _bar("measuring", by_itself=False) as show:
            yield show


@contextmanager
def _bar(title: str, by_itself: bool) -> Iterator[ProgressCallback]:
    """A bar that is drawn from time to time ``by_itself``, or else at every call alone."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from kvgen.cli.streams import error_console

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn())
    console = error_console()
    with Progress(*columns, console=console, transient=True, auto_refresh=by_itself) as bar:
        task = bar.add_task(title, total=None)

        def show(what: str, done: int, total: int) -> None:
            now = not by_itself
            bar.update(task, description=visible(what), completed=done, total=total, refresh=now)

        yield show


def _say_once() -> ProgressCallback:
    said: set[str] = set()

    def say(what: str, done: int, total: int) -> None:
        if what not in said:
            said.add(what)
            print(f"kvgen: {visible(what)}", file=sys.stderr, flush=True)

    return say
