"""The run profiles in ``configs/``: every key is an option, every value is accepted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from architectures import FOLDER
from conftest import Cli

from kvgen.cli.config import config_values
from kvgen.cli.main import app
from kvgen.errors import UsageError

PROFILES = sorted((FOLDER.parent).glob("*.toml"))
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def known(command: str) -> dict[str, Any]:
    return {
        long.removeprefix("--"): parameter
        for parameter in COMMANDS[command].params
        for long in parameter.opts
        if long.startswith("--")
    }


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("command", ["generate", "compare", "size"])
def test_every_key_is_an_option_of_its_command(path: Path, command: str) -> None:
    if command not in COMMANDS:
        pytest.skip(f"there is no kvgen {command} yet")
    assert config_values(path, command, known(command))


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_a_profile_runs(cli: Cli, tiny_folder: Path, path: Path) -> None:
    done = cli("size", FOLDER / "qwen3-8b.json", "--config", path)
    assert (done.returncode, done.stderr) == (0, "")
    done = cli(
        *("generate", "abc", "--model", tiny_folder, "--config", path, "-n", "3"),
        *("--format", "json", "--no-warmup"),
    )
    assert done.returncode == 0
    assert len(json.loads(done.stdout)["steps"]) <= 3


def test_the_command_line_wins_over_a_profile(cli: Cli) -> None:
    path = FOLDER.parent / "long-context.toml"
    done = cli("size", FOLDER / "qwen3-8b.json", "--config", path, "--context", "7", "-f", "json")
    rows = json.loads(done.stdout)["rows"]
    assert {row["context"] for row in rows} == {7}
    assert {row["kv_dtype"] for row in rows} == {"bfloat16", "int8", "int4"}


def test_an_unknown_key_names_the_nearest_known_one(tmp_path: Path, cli: Cli) -> None:
    path = tmp_path / "x.toml"
    path.write_text('[size]\ncontxt = "4k"\n', "utf-8")
    with pytest.raises(UsageError, match="'contxt'; the nearest is 'context'"):
        config_values(path, "size", known("size"))
    done = cli("size", FOLDER / "gpt2.json", "--config", path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "the nearest is 'context'" in done.stderr
