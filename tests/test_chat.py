"""``kvgen chat`` as a script and a person use it: stdin, stdout, stderr, Ctrl-C, a terminal."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from conftest import Cli, Done
from test_terminal import EVIL, environment, on_terminal
from tiny import END, byte_alphabet

from kvgen.cli.chatting import Chat
from kvgen.errors import InputError
from kvgen.report.document import schema

TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="session")
def chatty(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a chat template; its context holds 128 tokens."""
    folder = tmp_path_factory.mktemp("chatty") / "tiny-chat"
    shutil.copytree(tiny_folder, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE, "utf-8")
    assert END in (folder / "tokenizer.json").read_text("utf-8")
    return folder


@pytest.fixture
def chat(cli: Cli, chatty: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run ``kvgen chat`` in this process with ``text`` on its stdin."""

    def run(text: str | bytes, *arguments: str) -> Done:
        content = text.encode() if isinstance(text, str) else text
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
        return cli("chat", "-m", chatty, "-n", "5", *arguments)

    return run


def turns(done: Done) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.stdout.splitlines()]


# A script


def test_each_line_is_a_turn_and_each_answer_a_line(chat: Any) -> None:
    done = chat("One?\n\nTwo?\n")
    assert done.returncode == 0
    lines = turns(chat("One?\n\nTwo?\n", "--format", "jsonl"))
    assert [line["question"] for line in lines] == ["One?", "Two?"]
    assert done.stdout == "".join(line["answer"] + "\n" for line in lines)
    assert "> " not in done.stdout + done.stderr
    first, second = re.findall(r"prompt: (\d+) tokens submitted, (\d+) reused, (\d+)", done.stderr)
    assert first[1] == "0"
    assert int(second[0]) == int(second[1]) + int(second[2])


def test_json_lines_fit_their_schema(chat: Any) -> None:
    done = chat("One?\nTwo?\n", "--format", "jsonl", "--quiet")
    assert done.stderr == ""
    first, second = turns(done)
    for line in (first, second):
        jsonschema.validate(line, schema("chat-1"))
    assert (first["index"], second["index"]) == (0, 1)
    assert second["reuse"]["reused"] == first["cached_tokens"]
    assert second["reuse"]["saved_s"] > 0


def test_a_backslash_at_the_end_goes_on_in_the_next_line(chat: Any) -> None:
    lines = turns(chat("One\\\ntwo\\\n\nThree\\", "--format", "jsonl"))
    assert [line["question"] for line in lines] == ["One\ntwo\n", "Three"]


def test_undo_and_reset_leave_no_trace(chat: Any) -> None:
    plain = turns(chat("One?\nTwo?\n", "--format", "jsonl"))
    done = chat("Zero?\n/reset\nOne?\nNo!\n/undo\nTwo?\n/stats\n", "--format", "jsonl")
    assert [turns(done)[i]["answer_ids"] for i in (1, 3)] == [t["answer_ids"] for t in plain]
    assert "took back 'No!'; the cache keeps its first" in done.stderr
    assert "turns      4 answered, 20 new tokens" in done.stderr


def test_a_saved_conversation_goes_on(chat: Any, tmp_path: Path) -> None:
    file = tmp_path / "my talk"
    wanted = turns(chat("One?\nTwo?\n", "--format", "jsonl", "--system", "Hm."))[1]
    assert chat(f"One?\n/save {file}\n", "--system", "Hm.").returncode == 0
    done = chat(f"/load {file}\nTwo?\n", "--format", "jsonl")
    assert turns(done)[0]["answer_ids"] == wanted["answer_ids"]
    assert turns(done)[0]["reuse"]["reused"] == wanted["reuse"]["reused"]
    assert "goes on after 1 turn, " in done.stderr


@pytest.mark.parametrize(
    ("typed", "code", "message"),
    [
        ("/nope x", 2, "unknown command /nope; /help lists them; to say it, begin with a space"),
        ("/undo", 2, "there is no turn to take back"),
        ("/save", 2, "/save needs a file, such as /save talk.kvgen"),
        ("/load nowhere", 2, "cannot read nowhere: No such file or directory"),
        ("/save nowhere/talk", 2, "cannot write nowhere/talk: its folder must exist"),
        ("/save .", 2, "cannot write .: its folder must exist, and it must be a file"),
        ("?" * 130, 4, "the context is full: the conversation with this question has 135 tokens"),
        (b"\xff", 4, "this line is not UTF-8 text"),
    ],
)
def test_a_script_ends_at_its_first_error(
    chat: Any, typed: str | bytes, code: int, message: str
) -> None:
    line = typed if isinstance(typed, bytes) else typed.encode()
    done = chat(line + b"\nOne?\n")
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith(f"kvgen: {message}")
    assert done.stderr.count("\n") == 1


def test_a_message_may_begin_with_a_slash_after_a_space(chat: Any) -> None:
    assert turns(chat(" /undo\n", "--format", "jsonl"))[0]["question"] == " /undo"


def test_quit_ends_and_help_lists_every_command(chat: Any) -> None:
    from kvgen.cli.chatting import COMMANDS

    done = chat("/help\n/quit\nOne?\n")
    assert (done.returncode, done.stdout) == (0, "")
    assert all(f"/{name}" in done.stderr for name in COMMANDS)


def test_the_oldest_turns_are_dropped_when_asked_for(chat: Any) -> None:
    text = "A question of some length, number 1\n" * 4
    assert chat(text).returncode == 4
    done = chat(text, "--context-overflow", "drop-oldest", "--format", "jsonl")
    assert done.returncode == 0
    assert sum(line["dropped_turns"] for line in turns(done)) >= 2
    assert re.search(r"the context was full: the oldest turn was dropped, and \d+", done.stderr)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("hello",), 2, "unexpected extra argument"),
        (("--cache", "nope"), 2, "unknown cache 'nope'"),
        (("--top-k", "3"), 2, "no effect on greedy decoding"),
        (("--context-overflow", "wrap"), 2, "'wrap'"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(
    chat: Any, arguments: tuple[str, ...], code: int, message: str
) -> None:
    done = chat("One?\n", *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr


def test_a_model_without_a_template_cannot_talk(
    cli: Cli, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"One?\n")))
    done = cli("chat", "-m", tiny_folder)
    assert done.returncode == 2
    assert "no chat template" in done.stderr


def test_out_of_memory_is_one_line_and_the_turn_is_not_kept(
    chat: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvgen.engine.reply import Reply

    def no_memory(_: Reply) -> str:
        raise MemoryError

    monkeypatch.setattr(Reply, "step", no_memory)
    done = chat("One?\n")
    assert done.returncode == 4
    assert done.stderr.startswith("kvgen: out of memory; this turn is not kept")


# Ctrl-C

SLOW = (
    "import os, time\n"
    "from kvgen.engine.sampling import Sampler\n"
    "def slow(self, logits, so_far):\n"
    "    time.sleep(0.05)\n"
    f"    return {byte_alphabet().index('x')}\n"
    "Sampler.choose = slow\n"
)
"""Makes any model write x, twenty times a second."""


def test_a_script_that_gets_ctrl_c_keeps_the_answer_so_far_and_ends(
    chatty: Path, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW, "utf-8")
    with subprocess.Popen(
        [sys.executable, "-m", "kvgen", "chat", "-m", str(chatty), "-n", "60"],
        env=environment(tmp_path),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"One?\nTwo?\n")
        process.stdin.flush()
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        text, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert text.count(b"\n") >= 1
    assert b"stopped; the answer so far is kept" in errors
    assert errors.count(b"prompt:") == 1


def test_a_second_ctrl_c_breaks_the_step_off_and_the_cache_is_computed_again(
    chat: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvgen.engine.reply import Reply

    step, steps = Reply.step, iter(range(1000))

    def broken(reply: Reply) -> str:
        if next(steps) == 7:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return step(reply)

    monkeypatch.setattr(Reply, "step", broken)
    done = chat("One?\nTwo?\n", "--format", "jsonl")
    assert done.returncode == 130
    assert [line["question"] for line in turns(done)] == ["One?"]
    assert "broken off; this turn is not kept" in done.stderr


# A terminal


def screen(text: str) -> str:
    """Without the sequences by which line editing moves the cursor."""
    return re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", text).replace("\r", "")


def test_a_person_talks_stops_an_answer_and_goes_on(chatty: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW, "utf-8")
    env = environment(tmp_path, KVGEN_CACHE_DIR=str(tmp_path / "private"))
    line = [sys.executable, "-m", "kvgen", "chat", "-m", str(chatty), "-n", "60"]
    script = [
        ("> ", b"typed in vain"),
        ("vain", b"\x03"),  # at the prompt it clears the line
        ("\n> ", b"One?\n"),
        ("xx", b"\x03"),
        ("stopped", b""),
        ("> ", b"/nope\n"),
        ("unknown command", b""),
        ("> ", b"/stats\n"),
        ("context", b""),
        ("> ", b"\x04"),
    ]
    done = on_terminal(line, env, script=script)
    drawn = screen(done.screen)
    assert done.returncode == 0
    assert "/help lists commands, Ctrl-D ends" in drawn
    assert "kvgen: unknown command /nope" in drawn
    assert "turns      1 answered" in drawn
    assert "Traceback" not in drawn
    if find_spec("readline"):
        history = tmp_path / "private" / "chat-history"
        assert history.read_text("utf-8").splitlines()[-3:] == ["One?", "/nope", "/stats"]
        assert stat.S_IMODE(history.stat().st_mode) == 0o600


@pytest.mark.parametrize("raised", [KeyboardInterrupt(), InputError("no UTF-8")])
def test_what_a_person_types_never_ends_the_conversation(
    raised: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVGEN_CACHE_DIR", str(tmp_path))

    class Typed:
        interactive = True
        left = iter([raised, "/help", None])

        def read(self) -> Any:
            if isinstance(line := next(self.left), BaseException):
                raise line
            return line

    talk: Any = None
    assert Chat(talk, talk, Typed(), False, False, talk).run() == 0
    Typed.interactive, Typed.left = False, iter([raised])
    with pytest.raises(type(raised)):
        Chat(talk, talk, Typed(), False, False, talk).run()


def test_a_models_escape_sequences_are_spelled_out_to_a_person(
    chatty: Path, tmp_path: Path
) -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    letters = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(EVIL)[0][0]
    ids = [byte_alphabet().index(letter) for letter in letters]
    (tmp_path / "sitecustomize.py").write_text(
        f"from kvgen.engine.sampling import Sampler\nids = {ids}\n"
        "Sampler.choose = lambda self, logits, so_far: ids[(len(so_far) - 9) % len(ids)]\n",
        "utf-8",
    )
    line = [sys.executable, "-m", "kvgen", "chat", "-m", str(chatty), "-n", str(len(ids)), "-q"]
    env = environment(tmp_path, KVGEN_CACHE_DIR=str(tmp_path), TERM="dumb")
    done = on_terminal(line, env, script=[("> ", b"Who?\n"), ("end", b""), ("> ", b"\x04")])
    assert r"a\x1b[31mred\x1b]52;c;ZXZpbA==\x07\rb\x9b2J[bold]c[/bold]" in screen(done.screen)
    assert "\x1b]" not in done.screen
