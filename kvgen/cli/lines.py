"""What a person types, or a script sends, message by message.

On a terminal with line editing and a history that only its user can read, where Python has them.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from kvgen.cli.interrupts import terminated
from kvgen.cli.streams import decoded
from kvgen.errors import InputError
from kvgen.storage import cache_root, make_private

HISTORY_FILE = "chat-history"
_PROMPT, _MORE = "> ", ". "
_HISTORY_LINES = 1000


class Lines:
    """Messages from stdin. A line that ends with a backslash goes on in the next."""

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty()
        # Python edits lines only where it both reads from and writes to a terminal.
        self._edited = self.interactive and sys.stdout.isatty()

    def read(self) -> str | None:
        """The next message, ``None`` after the last. Raises ``InputError`` if it is no text.

        On a terminal, Ctrl-C drops what was typed and asks anew.
        """
        parts: list[str] = []
        while True:
            try:
                line = self._line(_MORE if parts else _PROMPT)
            except KeyboardInterrupt:
                if not self.interactive or terminated():
                    raise
                print(file=sys.stderr)
                parts = []
                continue
            except UnicodeDecodeError as error:
                raise InputError(f"this line is not UTF-8 text: {error}") from error
            if line is None:
                return "\n".join(parts) if parts else None
            if not line.endswith("\\"):
                return "\n".join([*parts, line])
            parts.append(line[:-1])

    def _line(self, prompt: str) -> str | None:
        if self._edited:
            try:
                return input(prompt)
            except EOFError:
                print(file=sys.stderr)
                return None
        if self.interactive:
            print(prompt, end="", file=sys.stderr, flush=True)
        line = sys.stdin.buffer.readline()
        return decoded(line) if line else None


@contextmanager
def history(lines: Lines) -> Iterator[None]:
    """Line editing during the block, with what was typed in earlier conversations.

    Without it where Python was built without readline, or the file cannot be read or written.
    """
    try:
        import readline
    except ImportError:
        yield
        return
    if not lines.interactive:
        yield
        return
    file = cache_root() / HISTORY_FILE
    readline.set_history_length(_HISTORY_LINES)
    with contextlib.suppress(OSError):
        readline.read_history_file(file)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            make_private(file.parent)
            os.close(os.open(file, os.O_CREAT | os.O_WRONLY, 0o600))
            readline.write_history_file(file)
