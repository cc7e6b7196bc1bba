"""Every command in the README runs, in order, in one folder, as a reader would type it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text("utf-8")
# These make the environment that the tests run in.
RUN_BY_CI_ITSELF = {"scripts/test"}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """A PATH on which ``kvgen`` and ``scripts/kvgen`` are this checkout's command."""
    command = f'#!/bin/sh\nexec "{sys.executable}" -m kvgen "$@"\n'
    for name in ("bin/kvgen", "work/scripts/kvgen"):
        file = tmp_path / name
        file.parent.mkdir(parents=True)
        file.write_text(command, "utf-8")
        file.chmod(0o755)
    (tmp_path / "work" / "README.md").write_text(README, "utf-8")
    shutil.copytree(ROOT / "configs", tmp_path / "work" / "configs")
    path = os.pathsep.join([str(tmp_path / "bin"), str(Path(sys.executable).parent)])
    modules = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PATH": f"{path}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": modules}


@pytest.mark.real
def test_every_shell_command_runs(shell: dict[str, str], tmp_path: Path) -> None:
    commands = [line for block in blocks("sh") for line in block.splitlines() if line.strip()]
    assert len(commands) > 5
    for command in commands:
        if command in RUN_BY_CI_ITSELF:
            continue
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=tmp_path / "work",
            env=shell,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, (command, done.stderr)
        assert "Traceback" not in done.stderr
    assert json.loads((tmp_path / "work" / "run.json").read_text("utf-8"))["steps"]
    assert (tmp_path / "work" / "continuation.txt").read_text("utf-8")


@pytest.mark.real
def test_the_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = blocks("python")
    exec(compile(example, "README", "exec"), {})
    assert capsys.readouterr().out.splitlines()[-1].endswith(" exact")


@pytest.mark.real
def test_the_captured_text_is_what_the_model_says(shell: dict[str, str], tmp_path: Path) -> None:
    command = re.search(r"<!-- captured: scripts/(kvgen .*) -->", README)
    assert command is not None
    captured = README[command.end() :].split("```text\n", 1)[1]
    done = subprocess.run(
        ["bash", "-c", command[1]], env=shell, capture_output=True, text=True, timeout=120
    )
    assert captured.startswith(done.stdout)


def test_the_captured_walk_is_the_one_that_the_documentation_tests() -> None:
    explained = (ROOT / "docs" / "explain.md").read_text("utf-8")
    captured = README.split("```text\n$ kvgen explain", 1)[1].split("```", 1)[0]
    assert f"```\n$ kvgen explain{captured}```" in explained
