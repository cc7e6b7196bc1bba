"""What a terminal gets and what a pipe gets, on a real pseudo-terminal."""

from __future__ import annotations

import gc
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from fcntl import ioctl
from pathlib import Path
from typing import Any, NamedTuple

import pyte
import pytest
from tiny import byte_alphabet

COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])[;m]")
EVIL = "a\x1b[31mred\x1b]52;c;ZXZpbA==\x07\rb\x9b2J[bold]c[/bold]\n\tend"


class Terminal(NamedTuple):
    """What a finished command has drawn, and its exit code."""

    screen: str
    returncode: int


def command(folder: Path, *arguments: str) -> list[str]:
    base = [sys.executable, "-m", "kvgen", "generate", "Time", "-m", str(folder), "--no-warmup"]
    return [*base, "--ignore-eos", *arguments]


def environment(folder: Path, **extra: str) -> dict[str, str]:
    """An ordinary terminal's, with a model that writes what the file in ``folder`` says."""
    path = os.pathsep.join([str(folder), os.getcwd(), os.environ.get("PYTHONPATH", "")])
    plain = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "FORCE_COLOR")}
    return plain | {"PYTHONPATH": path, "TERM": "xterm-256color"} | extra


@pytest.fixture
def evil(tmp_path: Path) -> Path:
    """A folder that, on the module path, makes any model write ``EVIL``."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(EVIL)[0][0]
    ids = [byte_alphabet().index(letter) for letter in letters]
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time\n"
        "from kvgen.engine.sampling import Sampler\n"
        f"ids = {ids}\n"
        "def choose(self, logits, so_far):\n"
        "    time.sleep(float(os.environ.get('SLOW_STEPS', 0)))\n"
        "    return ids[(len(so_far) - 4) % len(ids)]\n"
        "Sampler.choose = choose\n",
        "utf-8",
    )
    return tmp_path


NEW = str(len(EVIL.encode()))


def on_terminal(
    line: list[str],
    env: dict[str, str],
    *,
    columns: int = 80,
    script: Sequence[tuple[str, bytes]] = (),
) -> Terminal:
    """Run on a terminal of its own; of ``script``, each second part is typed once the first stands
    on the screen, after what had been seen before.
    """
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def take_terminal() -> None:
        os.setsid()
        ioctl(0, termios.TIOCSCTTY, 0)

    with subprocess.Popen(
        line, stdin=theirs, stdout=theirs, stderr=theirs, env=env, preexec_fn=take_terminal
    ) as process:
        os.close(theirs)
        drawn, end = b"", time.monotonic() + 120
        steps, seen = list(script), 0
        while time.monotonic() < end:
            if not select.select([ours], [], [], 0.1)[0]:
                continue
            try:
                part = os.read(ours, 65536)
            except OSError:  # the last of its users has closed it
                break
            if not part:
                break
            drawn += part
            while steps and (at := drawn.find(steps[0][0].encode(), seen)) >= 0:
                after, typed = steps.pop(0)
                seen = at + len(after.encode())
                time.sleep(0.3)  # a signal just before line editing waits for a key is lost on it
                os.write(ours, typed)
        else:
            process.kill()
        returncode = process.wait()
    os.close(ours)
    return Terminal(drawn.decode("utf-8", "replace"), returncode)


def test_escape_sequences_of_a_model_are_spelled_out_on_a_terminal(
    tiny_folder: Path, evil: Path
) -> None:
    line = command(tiny_folder, "-n", NEW, "--quiet")
    done = on_terminal(line, environment(evil))
    assert done.returncode == 0
    assert done.screen == (
        r"a\x1b[31mred\x1b]52;c;ZXZpbA==\x07\rb\x9b2J[bold]c[/bold]" + "\r\n\tend\r\n"
    )


class Watched(pyte.Screen):
    """A terminal's screen that notes what acts on more than its letters."""

    def __init__(self, columns: int = 80, lines: int = 24) -> None:
        self.acts: list[str] = []
        super().__init__(columns, lines)
        self.acts.clear()  # it sets itself up

    def set_title(self, param: str) -> None:
        self.acts.append(f"title {param}")

    def set_icon_name(self, param: str) -> None:
        self.acts.append(f"icon {param}")

    def erase_in_display(self, how: int = 0, *args: Any, **kwargs: Any) -> None:
        self.acts.append(f"erase {how}")

    def cursor_position(self, line: int | None = None, column: int | None = None) -> None:
        self.acts.append("cursor")

    def bell(self, *args: Any) -> None:
        self.acts.append("bell")

    def select_graphic_rendition(self, *attributes: int, **kwargs: Any) -> None:
        self.acts.append(f"colour {attributes}")


def emulated(drawn: str) -> Watched:
    """What a terminal makes of it. Of OSC 52 pyte knows nothing, so it is looked for by itself."""
    screen = Watched()
    pyte.Stream(screen).feed(drawn)
    return screen


def test_on_an_emulated_terminal_a_models_text_acts_on_nothing(
    tiny_folder: Path, evil: Path
) -> None:
    done = on_terminal(command(tiny_folder, "-n", NEW, "--quiet"), environment(evil))
    screen = emulated(done.screen)
    assert screen.acts == []
    assert "\x1b]52" not in done.screen
    assert screen.display[0].startswith(r"a\x1b[31mred\x1b]52;c;ZXZpbA==\x07\rb\x9b2J[bold]c")
    assert screen.display[1].strip() == "end"
    # The same text acts where nothing keeps it from acting.
    assert {act.split()[0] for act in emulated(EVIL).acts} >= {"colour", "erase"}


def test_a_pipe_gets_the_text_as_it_is(tiny_folder: Path, evil: Path) -> None:
    line = command(tiny_folder, "-n", NEW)
    done = subprocess.run(line, env=environment(evil), capture_output=True, timeout=120)
    assert done.stdout == EVIL.encode()
    # No bar, no colour, no cursor movement; tokens in the table are spelled out.
    assert not re.search(rb"[\x00-\x09\x0b-\x1f\x7f]", done.stderr)
    assert rb"\x1b" in done.stderr


def test_the_table_on_a_terminal_spells_tokens_out_and_fits_it(
    tiny_folder: Path, evil: Path
) -> None:
    line = command(tiny_folder, "-n", NEW, "--trace")
    done = on_terminal(line, environment(evil, NO_COLOR="1"))
    assert done.returncode == 0
    assert not COLOUR.search(done.screen)
    assert "\x1b]" not in done.screen
    assert "\x9b" not in done.screen
    plain = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", done.screen).replace("\r", "")
    table = plain[plain.index(" step  token") :]
    assert max(map(len, table.split("\n"))) <= 80
    assert "checked at 5 of" in table


def test_a_dumb_terminal_gets_no_escape_sequence(tiny_folder: Path, evil: Path) -> None:
    done = on_terminal(command(tiny_folder, "-n", NEW), environment(evil, TERM="dumb"))
    assert done.returncode == 0
    assert "\x1b" not in done.screen


def test_ctrl_c_on_the_keyboard_keeps_the_text_and_exits_130(tiny_folder: Path, evil: Path) -> None:
    env = environment(evil, SLOW_STEPS="0.05", TERM="dumb")
    line = command(tiny_folder, "-n", "120")
    done = on_terminal(line, env, script=[("red", b"\x03")])
    assert done.returncode == 130
    assert r"a\x1b[31mred" in done.screen
    assert "interrupted: nothing was recomputed" in done.screen
    assert "Traceback" not in done.screen


def test_garbage_is_collected_again_once_the_libraries_are_imported() -> None:
    from kvgen.cli.progress import loading

    gc.disable()  # as the program begins
    try:
        with loading(quiet=True):
            assert gc.isenabled()
            assert gc.get_freeze_count() > 0
    finally:
        gc.enable()
        gc.unfreeze()
