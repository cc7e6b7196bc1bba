"""What goes where: text and documents to stdout or a file, everything else to stderr."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TextIO

from rich.console import Console

from kvgen.errors import InputError, UsageError
from kvgen.report.units import visible_lines
from kvgen.storage import write_atomically


class ReaderLeftError(Exception):
    """Whoever read stdout has closed it, as ``head`` does. No error: nobody wants the rest."""


class Output:
    """Where a command's result goes: stdout piece by piece, or a file, whole, at the end.

    On a terminal, control characters in a model's text are spelled out, so that no text can move
    the cursor, set the title or write to the clipboard. A pipe or a file gets them unchanged.
    """

    def __init__(self, path: Path | None, stream: TextIO | None = None) -> None:
        """Raises ``UsageError`` when ``path`` cannot be a file to write."""
        self._path = path
        self._stream = stream or sys.stdout
        self._kept: list[str] = []
        self._terminal = path is None and self._stream.isatty()
        if path is not None:
            check_target(path)

    def write(self, text: str) -> None:
        """Add ``text``; on stdout it is visible at once. Raises ``ReaderLeftError``."""
        if self._path is not None:
            self._kept.append(text)
            return
        try:
            self._stream.write(visible_lines(text) if self._terminal else text)
            self._stream.flush()
        except BrokenPipeError as error:
            # Under a name of our own: the argument parser has another opinion on broken pipes.
            raise ReaderLeftError from error

    def end_line(self) -> None:
        """End the text with a line break where a person reads it."""
        if self._terminal:
            self.write("\n")

    def close(self) -> None:
        """Write the file, if it is one."""
        if self._path is None:
            return
        try:
            write_atomically(self._path, "".join(self._kept))
        except OSError as error:
            raise InputError(f"cannot write {self._path}: {error.strerror}") from error


def check_target(path: Path) -> None:
    """Raise ``UsageError`` when ``path`` cannot be a file to write."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UsageError(f"cannot write {path}: its folder must exist, and it must be a file")


def error_console() -> Console:
    """stderr for people: 80 columns and no colour where it is not a terminal."""
    return Console(stderr=True, highlight=False, markup=False, soft_wrap=False)


def read_prompt(argument: str | None, file: Path | None) -> str:
    """The prompt from the argument, ``--prompt-file``, ``-`` or a pipe.

    One line break at the very end of a file or a pipe is the file's, not the prompt's, and is
    dropped. Raises ``UsageError`` for none or two, ``InputError`` for what is not UTF-8 text.
    """
    if file is not None and argument is not None:
        raise UsageError("give the prompt once: as the argument or as --prompt-file")
    try:
        if file is not None:
            return _without_last_break(file.read_bytes().decode("utf-8"))
        if argument is not None and argument != "-":
            return argument
        if argument is None and sys.stdin.isatty():
            raise UsageError('no prompt; try: kvgen generate "Time flies"')
        return _without_last_break(sys.stdin.buffer.read().decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(f"the prompt is not UTF-8 text: {error}") from error
    except OSError as error:
        raise UsageError(f"cannot read the prompt from {file}: {error.strerror}") from error


def _without_last_break(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r")
