"""The examples in docs/compare.md: the shell one runs, and what they name exists."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "compare.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def run_in_shell(script: str, folder: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run ``script`` with a ``kvgen`` on the path that is this checkout's."""
    kvgen = folder / "kvgen"
    kvgen.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m kvgen "$@"\n', "utf-8")
    kvgen.chmod(kvgen.stat().st_mode | stat.S_IXUSR)
    path = os.pathsep.join([str(folder), os.environ["PATH"]])
    modules = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PATH": path, "PYTHONPATH": modules} | settings
    command = ["sh", "-c", script]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500
    )


@pytest.mark.real
def test_the_shell_example_passes_on_the_real_model(tmp_path: Path) -> None:
    (script,) = [block for block in blocks("sh") if "case" in block]
    done = run_in_shell(script, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "the cache pays"
    assert (tmp_path / "compare.json").is_file()
    assert "| no-cache |" in (tmp_path / "compare.md").read_text("utf-8")


def test_the_shell_example_fails_when_a_limit_is_exceeded(
    tmp_path: Path, tiny_folder: Path
) -> None:
    (script,) = [block for block in blocks("sh") if "case" in block]
    script = script.replace("4MiB", "1KiB")
    done = run_in_shell(script, tmp_path, KVGEN_MODEL=str(tiny_folder))
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "a limit was exceeded"


def test_every_option_that_the_page_names_exists(capsys: pytest.CaptureFixture[str]) -> None:
    import typer

    from kvgen.cli.main import app

    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    known = {name for command in commands.values() for p in command.params for name in p.opts}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", TEXT)) - {"--no-deps"}
    assert named <= known


def test_the_description_of_the_documents_is_up_to_date() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "describe-json"), "--check"])
    assert done.returncode == 0
