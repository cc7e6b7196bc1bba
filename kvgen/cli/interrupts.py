"""Ctrl-C and SIGTERM, neither lost nor a traceback, also while libraries are imported.

Some libraries swallow a KeyboardInterrupt that reaches them during their import. Every one is
therefore noted, and raised again where the preparation ends.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from kvgen.errors import KvgenError
from kvgen.models.ranks import Ranks

INTERRUPTED = 130

_noted: int | None = None
"""The signal that has come: Ctrl-C (SIGINT) or SIGTERM."""


class InterruptedEarlyError(KvgenError):
    """Ctrl-C before there was anything to keep."""

    exit_code = INTERRUPTED


def note_interrupts() -> None:
    """Note every Ctrl-C from now on, and SIGTERM, which ends a run as cleanly.

    Not where the caller has them ignored, as ``nohup`` does. Where Python can raise nothing, in a
    destructor or the callback of a weak reference, one is noted without its traceback.
    """
    shown = sys.unraisablehook

    def show(found: sys.UnraisableHookArgs) -> None:
        if not isinstance(found.exc_value, KeyboardInterrupt):
            shown(found)

    sys.unraisablehook = show
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _note)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _note)


def terminated() -> bool:
    """Whether SIGTERM has come: then nothing goes on that a Ctrl-C would let go on."""
    return _noted == signal.SIGTERM


def exit_code(code: int) -> int:
    """A run's exit code, as a shell knows it from the signal that ended the run."""
    return 128 + signal.SIGTERM if code == INTERRUPTED and terminated() else code


def stop_together(ranks: Ranks) -> None:
    """Have Ctrl-C and SIGTERM wait for the moment at which all ranks can stop.

    A second one does not wait. SIGTERM is what ``torchrun`` sends to the ranks that are left.
    """

    def note(number: int, frame: FrameType | None) -> None:
        if ranks.settled:
            return  # it is ending already
        ranks.stop_asked += 1
        ranks.interrupted |= number == signal.SIGINT
        if not ranks.lockstep or ranks.stop_asked > 1:
            _note(number, frame)

    for one in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(one) is not signal.SIG_IGN:
            signal.signal(one, note)


@contextmanager
def preparing() -> Iterator[None]:
    """Turn a Ctrl-C during the block into ``InterruptedEarlyError``, swallowed or not."""
    try:
        yield
    except BaseException as error:
        # An import that Ctrl-C broke off may come out as any other error.
        if _noted is not None or isinstance(error, KeyboardInterrupt):
            raise InterruptedEarlyError("interrupted") from error
        raise
    if _noted is not None:
        raise InterruptedEarlyError("interrupted")


@contextmanager
def stopping() -> Iterator[Callable[[], bool]]:
    """Whether a Ctrl-C has come during the block, which it does not break off; a second one does.

    Where the caller has it ignored, it stays so.
    """
    came = False

    def note(_signal: int, _frame: FrameType | None) -> None:
        nonlocal came
        if came:
            raise KeyboardInterrupt
        came = True

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, note)
    try:
        yield lambda: came
    finally:
        if before is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, before)


def _note(number: int, _frame: FrameType | None) -> None:
    global _noted
    _noted = number
    raise KeyboardInterrupt
