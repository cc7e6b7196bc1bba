"""Turns whatever a library raises while loading into one clear line. Imports kvgen.errors only."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from kvgen.errors import InputError, KvgenError, ModelError

_MAX_LINE = 300
_OUT_OF_MEMORY = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|not enough memory", re.IGNORECASE
)


def one_line(error: BaseException) -> str:
    """The error's text as a single line of at most 300 characters, or its type if it has none."""
    text = " ".join(str(error).split())
    if isinstance(error, KeyError):  # whose text is the key alone
        text = f"no {text}"
    if len(text) > _MAX_LINE:
        text = text[: _MAX_LINE - 1].rstrip() + "…"
    return text or type(error).__name__


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on the host or on a device."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, (OSError, RuntimeError)) and bool(_OUT_OF_MEMORY.search(str(error)))


@contextmanager
def failing_as_model_error(subject: str) -> Iterator[None]:
    """Re-raise any failure inside as ModelError "subject: reason", memory shortage as InputError.

    The libraries below raise nearly every exception type there is (the tokenizers library even
    bare ``Exception``), so this is the one place that catches all of them. kvgen's own errors pass.
    """
    try:
        yield
    except KvgenError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise InputError(
                f"{subject}: not enough memory; use a smaller model or --dtype bfloat16"
            ) from error
        raise ModelError(f"{subject}: {one_line(error)}") from error
