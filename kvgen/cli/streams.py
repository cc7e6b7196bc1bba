"""What goes where: text and documents to stdout or a file, everything else to stderr."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path
from typing import TextIO

from rich.console import Console

from kvgen.errors import InputError, KvgenError, UsageError
from kvgen.report.units import visible_lines
from kvgen.storage import is_device, write_atomically


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
        self.on_terminal = path is None and self._stream.isatty()
        """Whether a person sees it come."""
        if path is not None:
            check_target(path)

    def write(self, text: str) -> None:
        """Add ``text``; on stdout it is visible at once. Raises ``ReaderLeftError``."""
        if self._path is not None:
            self._kept.append(text)
            return
        try:
            self._stream.write(visible_lines(text) if self.on_terminal else text)
            self._stream.flush()
        except BrokenPipeError as error:
            # Under a name of our own: the argument parser has another opinion on broken pipes.
            raise ReaderLeftError from error
        except OSError as error:
            raise KvgenError(f"cannot write to stdout: {error.strerror}") from error

    def end_line(self) -> None:
        """End the text with a line break where a person reads it."""
        if self.on_terminal:
            self.write("\n")

    def close(self) -> None:
        """Write the file, if it is one."""
        if self._path is None:
            return
        try:
            write_atomically(self._path, "".join(self._kept))
        except OSError as error:
            raise KvgenError(f"cannot write {self._path}: {error.strerror}") from error


def check_target(path: Path) -> None:
    """Find what is wrong with a file before the work whose result it is to hold.

    Raises ``UsageError``.
    """
    place = path if is_device(path) else path.resolve().parent
    if path.is_dir() or not place.exists():
        raise UsageError(f"cannot write {path}: its folder must exist, and it must be a file")
    if not os.access(place, os.W_OK):
        raise UsageError(f"cannot write {path}: {place} is not writable; choose another place")


def prepare_streams() -> None:
    """Make the standard streams fit for any text, also where the caller has closed them.

    Pipes and files carry UTF-8 whatever the locale, as prompts are read; a terminal that cannot
    show a character gets it spelled out. A closed stream becomes the null device, because its
    number would otherwise go to the next file that is opened.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            encoding = stream.encoding if stream.isatty() else "utf-8"
            stream.reconfigure(encoding=encoding, errors="backslashreplace")
            if name == "stdout" and isinstance(stream.buffer, io.RawIOBase):
                # Unbuffered (python -u), where what one write call leaves over is lost.
                whole = io.BufferedWriter(stream.buffer)
                sys.stdout = io.TextIOWrapper(whole, encoding, "backslashreplace")


def leave_streams() -> None:
    """Have nothing left to write when Python ends.

    It flushes both streams once more then, and where nobody reads any longer, or the disk is full,
    it would complain and change the exit code. What cannot be written goes to the null device.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class _ErrorConsole(Console):
    """A console that goes on silently when nobody reads it any more."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


def error_console() -> Console:
    """stderr for people: 80 columns and no colour where it is not a terminal."""
    return _ErrorConsole(stderr=True, highlight=False, markup=False, soft_wrap=False)


def read_prompt(argument: str | None, file: Path | None) -> str:
    """The prompt from the argument, ``--prompt-file``, ``-`` or a pipe.

    One line break at the very end of a file or a pipe is the file's, not the prompt's, and is
    dropped. Raises ``UsageError`` for none or two, ``InputError`` for what is not UTF-8 text.
    """
    if file is not None and argument is not None:
        raise UsageError("give the prompt once: as the argument or as --prompt-file")
    try:
        if file is not None:
            return decoded(file.read_bytes())
        if argument is not None and argument != "-":
            return argument
        if argument is None and sys.stdin.isatty():
            raise UsageError('no prompt; try: kvgen generate "Time flies"')
        return decoded(sys.stdin.buffer.read())
    except UnicodeDecodeError as error:
        raise InputError(f"the prompt is not UTF-8 text: {error}") from error
    except OSError as error:
        place = file or "stdin"
        raise UsageError(f"cannot read the prompt from {place}: {error.strerror}") from error


def decoded(content: bytes) -> str:
    """UTF-8 text less one line break at its end. Raises ``UnicodeDecodeError``."""
    # With or without the mark that some editors put before UTF-8.
    return content.decode("utf-8-sig").removesuffix("\n").removesuffix("\r")
