"""The errors a user can meet, each with its exit code. Imports nothing of kvgen.

Raised where the problem is understood, turned into one line of text in ``kvgen.cli.main`` only.
The message says what was wrong, what was expected and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LISTED = 10  # names that one line has room for


class KvgenError(Exception):
    """Anything kvgen reports in one line instead of a traceback."""

    exit_code = 1


class UsageError(KvgenError):
    """Options or arguments that cannot be meant."""

    exit_code = 2


class ModelError(KvgenError):
    """The model or its tokenizer cannot be found, read, trusted or served."""

    exit_code = 3


class InputError(KvgenError):
    """The input does not fit: empty prompt, context length, memory."""

    exit_code = 4


class DisagreementError(KvgenError):
    """Cached and uncached forwards disagree."""

    exit_code = 5


class GateError(KvgenError):
    """A performance gate failed."""

    exit_code = 6


def nearest(name: str, known: Iterable[str]) -> str:
    """What may have been meant by an unknown name: the one it resembles, else what there is."""
    names = list(known)
    if near := difflib.get_close_matches(name, names, n=1):
        return f"; the nearest is {near[0]!r}"
    return f"; there are {', '.join(names)}" if len(names) <= _LISTED else "; --help lists them"
