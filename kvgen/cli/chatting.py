"""The loop of a conversation: messages and commands in, answers on stdout, the rest on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvgen.cli.interrupts import INTERRUPTED, stopping, terminated
from kvgen.cli.lines import Lines, history
from kvgen.errors import InputError, KvgenError, UsageError

if TYPE_CHECKING:
    from kvgen.cli.streams import Output
    from kvgen.engine.conversation import Conversation
    from kvgen.engine.conversation_file import ConversationFiles
    from kvgen.measure.turns import MeasuredConversation


class _Quit(Exception):  # noqa: N818
    """The person has had enough."""


@dataclass
class Chat:
    """One conversation on a terminal or a pipe.

    On a terminal an error is a line and the conversation goes on; a script ends with its code.
    """

    measured: MeasuredConversation
    output: Output
    lines: Lines
    jsonl: bool
    receipts: bool
    files: ConversationFiles

    @property
    def talk(self) -> Conversation:
        """What is measured."""
        return self.measured.conversation

    def greet(self) -> None:
        """Say with whom one talks."""
        loaded = self.talk.loaded
        who = f"{loaded.source.name}: {loaded.dtype_name} on {loaded.device}"
        _say(f"{who}; /help lists commands, Ctrl-D ends")

    def run(self) -> int:
        """Until the end of the input or ``/quit``; returns the exit code."""
        lines = self.lines
        with history(lines):
            while True:
                try:
                    message = lines.read()
                    if message is None:
                        break
                    if self._take(message) and not lines.interactive:
                        return INTERRUPTED
                except _Quit:
                    break
                except KeyboardInterrupt:
                    if not lines.interactive or terminated():
                        raise
                    _say("")  # it came between an answer and the prompt
                except KvgenError as error:
                    if not lines.interactive:
                        raise
                    _say(f"kvgen: {error}")
        return 0

    def _take(self, message: str) -> bool:
        """Do what a message asks for; whether Ctrl-C stopped it."""
        if not message.strip():
            return False
        if not message.startswith("/"):
            return self._turn(message)
        name, _, argument = message[1:].partition(" ")
        if name not in COMMANDS:
            raise UsageError(
                f"unknown command /{name}; /help lists them; to say it, begin with a space"
            )
        COMMANDS[name].run(self, argument.strip())
        return False

    def _turn(self, question: str) -> bool:
        from kvgen.models.failures import is_out_of_memory
        from kvgen.report.chat import turn_document, turn_lines
        from kvgen.report.document import to_json

        with stopping() as came:
            pieces = self.measured.ask(question, came)
            try:
                with closing(pieces):
                    for piece in pieces:
                        if not self.jsonl and piece:
                            self.output.write(piece)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                self._end_line()
                raise InputError(
                    "out of memory; this turn is not kept, and what was cached is computed again. "
                    "A shorter conversation, --cache int8 or --prefill-chunk 128 needs less"
                ) from error
            except KeyboardInterrupt:
                self._end_line()
                if terminated():
                    raise
                _say("broken off; this turn is not kept, and what was cached is computed again")
                return True
        self._end_line()
        record = self.measured.record
        if record is not None and self.jsonl:
            self.output.write(to_json(turn_document(record)) + "\n")
        if record is not None and self.receipts:
            for line in turn_lines(record):
                _say(f"  {line}")
        return came()

    def _end_line(self) -> None:
        if not self.jsonl:
            self.output.write("\n")


def _stats(chat: Chat, _: str) -> None:
    from kvgen.report.chat import state_line, tally_lines

    talk, cache = chat.talk, chat.talk.cache
    for line in tally_lines(chat.measured.tally):
        _say(f"  {line}")
    limit = talk.loaded.context_limit
    sizes = cache.bytes_used, cache.bytes_allocated
    _say(f"  {state_line(len(talk.ids), limit, cache.position, *sizes)}")


def _undo(chat: Chat, _: str) -> None:
    from kvgen.report.units import counted

    undone = chat.talk.undo()
    if undone is None:
        raise UsageError("there is no turn to take back")
    line = f"took back {_shortened(undone.turn.question)!r}"
    if undone.refusal is None:
        line += f"; the cache keeps its first {counted(undone.held, 'token')}"
    elif undone.held:
        line += f"; the cache goes back to a copy of its first {counted(undone.held, 'token')}"
    if undone.held < undone.wanted:
        line += f"; {counted(undone.wanted - undone.held, 'token')} will be computed again"
    if undone.refusal is not None:
        line += f": {undone.refusal}"
    _say(f"  {line}")


def _save(chat: Chat, name: str) -> None:
    from kvgen.cli.streams import check_target
    from kvgen.report.units import bytes_text, counted

    path = _path("save", name)
    check_target(path)
    size = chat.files.save(path)
    turns = counted(len(chat.talk.turns), "turn")
    tokens = counted(chat.talk.cache.position, "cached token")
    _say(f"  saved {turns} with {tokens}: {bytes_text(size)} in {path}")


def _load(chat: Chat, name: str) -> None:
    from kvgen.report.units import counted

    path = _path("load", name)
    chat.files.load(path)
    talk = chat.talk
    _say(
        f"  goes on after {counted(len(talk.turns), 'turn')}, {counted(len(talk.ids), 'token')}, "
        f"{talk.cache.position:,} of them cached"
    )


def _path(command: str, name: str) -> Path:
    if not name:
        raise UsageError(f"/{command} needs a file, such as /{command} talk.kvgen")
    return Path(name).expanduser()


def _reset(chat: Chat, _: str) -> None:
    chat.talk.reset()
    _say(f"  the conversation begins anew; {chat.talk.cache.position:,} tokens stay cached")


def _help(_chat: Chat, _: str) -> None:
    for name, command in COMMANDS.items():
        _say(f"  /{name + ' ' + command.argument:<12}{command.about}")
    _say("  A line that ends with \\ goes on in the next. Ctrl-C stops an answer, Ctrl-D ends.")


def _quit(_chat: Chat, _: str) -> None:
    raise _Quit


@dataclass(frozen=True)
class _Command:
    run: Callable[[Chat, str], None]
    about: str
    argument: str = ""


COMMANDS = {
    "stats": _Command(_stats, "what was reused, computed and saved, and what the cache holds"),
    "undo": _Command(_undo, "take the last turn back, and the cache with it"),
    "save": _Command(_save, "write the conversation and its cache to a file", "FILE"),
    "load": _Command(_load, "go on with a saved conversation", "FILE"),
    "reset": _Command(_reset, "begin anew; the system message stays"),
    "help": _Command(_help, "this list"),
    "quit": _Command(_quit, "end"),
}


def _shortened(text: str, at_most: int = 40) -> str:
    line = " ".join(text.split())
    return line if len(line) <= at_most else line[: at_most - 1].rstrip() + "…"


def _say(text: str) -> None:
    from kvgen.report.units import visible

    try:
        print(visible(text), file=sys.stderr, flush=True)
    except OSError:  # nobody reads it any more
        return
