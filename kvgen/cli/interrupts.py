"""Ctrl-C that is neither lost nor a traceback, also while libraries are imported and models read.

Some libraries swallow a KeyboardInterrupt that reaches them during their import. Every one is
therefore noted, and raised again where the preparation ends.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from kvgen.errors import KvgenError

_noted = False


class InterruptedEarlyError(KvgenError):
    """Ctrl-C before there was anything to keep."""

    exit_code = 130


def note_interrupts() -> None:
    """Note every Ctrl-C from now on; not where the caller has it ignored, as ``nohup`` does."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _note)


@contextmanager
def preparing() -> Iterator[None]:
    """Turn a Ctrl-C during the block into ``InterruptedEarlyError``, swallowed or not."""
    try:
        yield
    except BaseException as error:
        # An import that Ctrl-C broke off may come out as any other error.
        if _noted or isinstance(error, KeyboardInterrupt):
            raise InterruptedEarlyError("interrupted") from error
        raise
    if _noted:
        raise InterruptedEarlyError("interrupted")


def _note(_signal: int, _frame: FrameType | None) -> None:
    global _noted
    _noted = True
    raise KeyboardInterrupt
