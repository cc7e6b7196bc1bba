"""Where the results of a batch go, line by line: a run that is killed loses no finished one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvgen.cli.streams import Output, check_target
from kvgen.errors import KvgenError, UsageError
from kvgen.measure.requests import Id
from kvgen.report.batch import SCHEMA
from kvgen.report.document import to_json
from kvgen.storage import is_device, write_atomically


class InOrder:
    """Results on stdout, in the input's order: one that is early waits for those before it."""

    def __init__(self, output: Output) -> None:
        self.finished: dict[Id, str] = {}
        self._output = output
        self._order: list[Id] = []
        self._early: dict[Id, str] = {}

    @property
    def on_terminal(self) -> bool:
        """Whether a person sees them come."""
        return self._output.on_terminal

    def begin(self, order: Sequence[Id]) -> None:
        """``order`` is that of all results to come."""
        self._order = list(reversed(order))

    def write(self, line: dict[str, Any]) -> None:
        """Take one result."""
        self._early[line["id"]] = to_json(line) + "\n"
        while self._order and self._order[-1] in self._early:
            self._output.write(self._early.pop(self._order.pop()))

    def close(self) -> None:
        """Write what still waits for a result that did not come, and end."""
        for key in reversed(self._order):
            if key in self._early:
                self._output.write(self._early.pop(key))
        self._output.close()


class ResultFile:
    """Results in a file: each is written as soon as it is there, and put into order at the end.

    ``finished`` are those that an earlier run has written, by id the ``request`` they answer.
    """

    on_terminal = False

    def __init__(self, path: Path, resume: bool) -> None:
        """With ``resume`` the file may be there; half a line at its end is cut off.

        Raises ``UsageError`` for a file that is there otherwise, or that holds anything else.
        """
        check_target(path)
        self._path = path
        self._order: list[Id] = []
        try:
            content = path.read_bytes() if path.exists() else b""
            if content and not resume:
                raise UsageError(
                    f"{path} is there already; go on with it (--resume) or write to another file"
                )
            whole = content[: content.rfind(b"\n") + 1]
            self.finished = {line["id"]: line["request"] for line in self._parsed(whole)}
            # Unbuffered: a line is in the file, whole, as soon as it is written.
            self._file = path.open("ab", buffering=0)
            self._file.truncate(len(whole))
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}") from error

    def begin(self, order: Sequence[Id]) -> None:
        """``order`` is that of all results, earlier ones included."""
        self._order = list(order)

    def write(self, line: dict[str, Any]) -> None:
        """Add one result."""
        try:
            left = (to_json(line) + "\n").encode("utf-8")
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            raise KvgenError(
                f"cannot write {self._path}: {error.strerror}; --resume goes on from what it holds"
            ) from error

    def close(self) -> None:
        """Put the lines into the input's order. An error leaves them as they are."""
        place = {key: index for index, key in enumerate(self._order)}
        try:
            self._file.close()
            content = self._path.read_bytes()
            lines = content[: content.rfind(b"\n") + 1].splitlines(keepends=True)
            ids = [line["id"] for line in self._parsed(b"".join(lines))]
            order = sorted(range(len(ids)), key=lambda i: place.get(ids[i], len(place)))
            if order != sorted(order):
                write_atomically(self._path, b"".join(lines[i] for i in order))
        except OSError as error:
            raise KvgenError(f"cannot write {self._path}: {error.strerror}") from error

    def _parsed(self, content: bytes) -> list[dict[str, Any]]:
        failing = f"cannot go on with {self._path}"
        return [result_of(line, failing, i) for i, line in enumerate(content.splitlines(), 1)]


def result_of(line: bytes, failing: str, number: int) -> dict[str, Any]:
    """A line of results. Raises ``UsageError``, ``failing`` first, for anything else."""
    try:
        result: dict[str, Any] = json.loads(line)
        named = isinstance(result["id"], str | int) and isinstance(result["request"], str)
        if result["schema"] != SCHEMA or not named:
            raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"{failing}: its line {number} is no result of kvgen batch") from error
    return result


def results_to(path: Path | None, resume: bool) -> InOrder | ResultFile:
    """Where results go. Raises ``UsageError`` for what cannot be resumed."""
    if path is not None and not is_device(path):
        return ResultFile(path, resume)
    if resume:
        raise UsageError("--resume goes on with a file; name it with --output")
    return InOrder(Output(path))
