"""Ctrl-C before the first token: one line and exit code 130, whoever tries to swallow it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Cli

BEGIN = "import os, signal\n"
HIT = "os.kill(os.getpid(), signal.SIGINT)"


def interrupted_at(folder: Path, hook: str) -> tuple[int, str]:
    """Exit code and stderr of a process in which ``hook`` runs at its start."""
    (folder / "sitecustomize.py").write_text(BEGIN + hook, "utf-8")
    path = os.pathsep.join([str(folder), os.getcwd(), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "kvgen", "generate", "Time", "-m", str(folder)],
        env=os.environ | {"PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stderr


def test_a_ctrl_c_while_the_command_is_imported_ends_it_quietly(tmp_path: Path) -> None:
    hook = (
        "import sys\n"
        "class Hit:\n"
        "    def find_spec(self, name, *rest):\n"
        f"        if name == 'kvgen.cli.generate': {HIT}\n"
        "sys.meta_path.insert(0, Hit())\n"
    )
    assert interrupted_at(tmp_path, hook) == (130, "")


@pytest.mark.parametrize("after", ["pass", "raise ImportError('broken off')"])
def test_a_ctrl_c_that_a_library_swallows_is_not_lost(tmp_path: Path, after: str) -> None:
    hook = (
        "import kvgen.cli.streams as streams\n"
        "read = streams.read_prompt\n"
        "import sys\n"
        "class Swallowing:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'kvgen.measure.run':\n"
        f"            try: {HIT}\n"
        "            except KeyboardInterrupt:\n"
        f"                {after}\n"
        "sys.meta_path.insert(0, Swallowing())\n"
    )
    assert interrupted_at(tmp_path, hook) == (130, "kvgen: interrupted\n")


def test_a_ctrl_c_where_python_can_raise_nothing_is_not_lost(tmp_path: Path) -> None:
    hook = (
        "import sys\n"
        "class Dying:\n"
        f"    def __del__(self): {HIT}\n"
        "class Last:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'kvgen.measure.run': Dying()\n"
        "sys.meta_path.insert(0, Last())\n"
    )
    assert interrupted_at(tmp_path, hook) == (130, "kvgen: interrupted\n")


def test_a_ctrl_c_while_the_model_is_read_is_one_line(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvgen.models.load_model", interrupt)
    assert cli("generate", "Time") == (130, "", "kvgen: interrupted\n")


def test_a_ctrl_c_while_recomputing_keeps_text_and_table(
    cli: Cli, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvgen.measure.run.recompute", interrupt)
    line = ("generate", "Time", "-m", tiny_folder, "-n", "5", "--ignore-eos")
    done = cli(*line)
    assert done.returncode == 130
    assert done.stdout
    assert "interrupted: nothing was recomputed" in done.stderr
    assert "total" in done.stderr
    file = tmp_path / "text"
    assert cli(*line, "-o", file).returncode == 130
    assert file.read_text("utf-8") == done.stdout


def test_an_ignored_ctrl_c_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvgen.cli.interrupts import note_interrupts

    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        note_interrupts()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
