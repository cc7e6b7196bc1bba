"""Streams that are closed or full, odd places to write to, odd prompts and settings: each ends as a
person would expect, in one line.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Cli

from kvgen.cli.config import config_values
from kvgen.engine.sampling import Sampler, SamplingOptions
from kvgen.errors import ModelError, UsageError
from kvgen.storage import write_atomically

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.is_char_device(), reason="this system has no /dev/full")


def shell(line: str, **environment: str) -> tuple[int, bytes, str]:
    """Run a shell line in which $KVGEN stands for the command; its exit code and streams."""
    command = f"{sys.executable} -m kvgen"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; KVGEN='{command}'; {line}"],
        env=os.environ | environment,
        capture_output=True,
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr.decode()


def generate(folder: Path, *arguments: str) -> str:
    return " ".join(["$KVGEN generate", *arguments, f"-m {folder} -n 3 --ignore-eos --no-warmup"])


# Standard streams


@needs_full
def test_a_full_disk_behind_stdout_is_one_line(tiny_folder: Path) -> None:
    code, _, errors = shell(f"{generate(tiny_folder, 'Time')} > /dev/full")
    assert (code, errors) == (1, "kvgen: cannot write to stdout: No space left on device\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_disk_that_fills_up_midway_is_one_line(
    tiny_folder: Path, tmp_path: Path, unbuffered: str
) -> None:
    line = f"ulimit -f 1; $KVGEN size {tiny_folder} -f json > {tmp_path / 'size.json'}"
    code, _, errors = shell(line, PYTHONUNBUFFERED=unbuffered)
    assert (code, errors) == (1, "kvgen: cannot write to stdout: File too large\n")


def test_closed_streams_are_no_error(tiny_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "text"
    code, _, errors = shell(f"{generate(tiny_folder, 'Time', '-q', '-o', str(file))} >&- <&-")
    assert (code, errors) == (0, "")
    code, text, _ = shell(f"{generate(tiny_folder, 'Time')} 2>&-")
    assert code == 0
    assert text.decode() == file.read_text("utf-8") != ""


def test_no_prompt_on_a_closed_stdin_is_an_empty_prompt(tiny_folder: Path) -> None:
    code, _, errors = shell(f"{generate(tiny_folder)} <&-")
    assert code == 4
    assert "the prompt is empty" in errors
    assert errors.count("\n") == 1


def test_a_reader_of_the_table_that_leaves_changes_nothing(
    tiny_folder: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text"
    code, first, errors = shell(f"({generate(tiny_folder, 'Time')} 2>&1 >{text}) | head -c 1")
    assert (code, len(first), errors) == (0, 1, "")
    assert text.read_text("utf-8")


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_pipe_carries_utf8_whatever_the_locale(tiny_folder: Path, form: str) -> None:
    line = generate(tiny_folder, "Zürich→漢", "-f", form)
    code, out, errors = shell(line, PYTHONIOENCODING="ascii", LC_ALL="C.UTF-8")
    assert code == 0, errors
    text = out.decode("utf-8")
    if form == "json":
        assert json.loads(text)["prompt"] == "Zürich→漢"
        assert "Zürich→漢" in text


# --output


def test_a_device_is_written_to_and_never_replaced(tmp_path: Path) -> None:
    pipe, got = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_text("utf-8")))
    reader.start()
    write_atomically(pipe, "text")
    reader.join(10)
    assert got == ["text"]
    assert pipe.is_fifo()
    assert [file.name for file in tmp_path.iterdir()] == ["pipe"]


def test_a_link_stays_a_link_and_permissions_stay(tmp_path: Path) -> None:
    target, link = tmp_path / "deep" / "target", tmp_path / "link"
    target.parent.mkdir()
    target.write_text("old", "utf-8")
    target.chmod(0o640)
    link.symlink_to(target)
    write_atomically(link, "new")
    assert link.is_symlink()
    assert target.read_text("utf-8") == "new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


def test_a_new_file_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "new", "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640


def test_a_write_that_fails_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("old", "utf-8")

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_atomically(file, "new")
    assert [f.name for f in tmp_path.iterdir()] == ["file"]
    assert file.read_text("utf-8") == "old"


def test_an_output_that_cannot_be_written_is_one_line(
    cli: Cli, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    done = cli("generate", "Time", "-m", tiny_folder, "-n", "2", "-q", "-o", tmp_path / "file")
    assert done.returncode == 1
    assert done.stderr == f"kvgen: cannot write {tmp_path / 'file'}: No space left on device\n"
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_is_not_writable_is_found_before_the_work(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    done = cli("generate", "Time", "-m", "no-such-model", "-o", tmp_path / "file")
    assert done.returncode == 2
    assert "is not writable" in done.stderr


# Prompts


@pytest.mark.parametrize("prompt", ["   ", "\x00", "a\x00b", "שלום עולם", "\u202etime", "e\u0301"])
def test_any_text_is_a_prompt(cli: Cli, tiny_folder: Path, tmp_path: Path, prompt: str) -> None:
    file = tmp_path / "prompt"
    file.write_text(prompt, "utf-8")
    done = cli("generate", "-m", tiny_folder, "-n", "1", "-f", "json", "-q", "--prompt-file", file)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["prompt"] == prompt
    assert document["prompt_tokens"] == len(prompt.encode())


def test_a_byte_order_mark_is_not_part_of_the_prompt(
    cli: Cli, tiny_folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "prompt"
    file.write_bytes(b"\xef\xbb\xbfTime\r\n")
    done = cli("generate", "-m", tiny_folder, "-n", "1", "-f", "json", "-q", "--prompt-file", file)
    assert json.loads(done.stdout)["prompt"] == "Time"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["Time", "flies"], 2, "needs quotes"),
        (["\udcff"], 4, "not valid text"),
        (["x" * 1_000_000], 4, "1,000,000 tokens"),
        (["x", "--threads", "1000000"], 2, "choose at most that"),
        (["x", "--temperature", "nan"], 2, "--temperature"),
        (["x", "--temperature", "inf"], 2, "--temperature"),
        (["x", "--temperature", "1", "--top-p", "0"], 2, "--top-p"),
        (["x", "--temperature", "1", "--seed", "-1"], 2, "--seed"),
        (["x", "--repetition-penalty", "0"], 2, "--repetition-penalty"),
        (["x", "--chat"], 2, "no chat template"),
        (["x", "--device", "tpu"], 2, "tpu"),
        (["x", "-n", "99999999999999999999"], 4, "-n 127"),
    ],
)
def test_what_cannot_be_meant_is_one_line(
    cli: Cli, tiny_folder: Path, arguments: list[str], code: int, says: str
) -> None:
    done = cli("generate", "-m", tiny_folder, *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


# The model


def test_an_id_beyond_the_models_table_is_explained(
    cli: Cli, tiny_folder: Path, tmp_path: Path
) -> None:
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text("utf-8"))
    tokenizer["model"]["vocab"]["T"] = 5000
    file.write_text(json.dumps(tokenizer), "utf-8")
    done = cli("generate", "Time", "-m", folder, "-n", "1")
    assert done.returncode == 3
    assert "id 5000 and the model knows 257" in done.stderr


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_an_error_and_no_token(
    temperature: float, bad: float
) -> None:
    sampler = Sampler(SamplingOptions(temperature=temperature))
    with pytest.raises(ModelError, match="float32"):
        sampler.choose(torch.tensor([0.0, bad, 1.0]), [0])


@pytest.mark.parametrize("temperature", [5e-324, 1e-320, 1e-45, 1e-30, 1e-3])
def test_the_coldest_temperatures_are_greedy(temperature: float) -> None:
    logits = torch.tensor([-80.0, 3.0, 2.9, float("-inf"), -3e38])
    sampler = Sampler(SamplingOptions(temperature=temperature, seed=1))
    assert {sampler.choose(logits, [0]) for _ in range(20)} == {1}


def test_the_hottest_temperature_makes_all_tokens_alike() -> None:
    logits = torch.tensor([-80.0, 3.0, 2.9, 40.0])
    sampler = Sampler(SamplingOptions(temperature=1e308, seed=1))
    assert {sampler.choose(logits, [0]) for _ in range(100)} == {0, 1, 2, 3}


# Settings


def test_a_wrong_value_in_the_environment_names_value_and_variable(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVGEN_MAX_NEW_TOKENS", "many")
    done = cli("generate", "Time")
    assert done.returncode == 2
    assert "'many' in KVGEN_MAX_NEW_TOKENS" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_wrong_value_in_a_profile_is_shown(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('temperature = "hot"\n', "utf-8")
    done = cli("generate", "Time", "--config", file)
    assert done.returncode == 2
    assert "'hot' in the file of --config" in done.stderr


def known() -> dict[str, Any]:
    import typer

    from kvgen.cli.main import app

    command: Any = typer.main.get_command(app)
    options = command.commands["generate"].params
    return {long.removeprefix("--"): p for p in options for long in p.opts if long[:2] == "--"}


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("max-new-tokens = true", "text or a number"),
        ("max-new-tokens = [3]", "text or a number"),
        ("max-new-tokens = 2024-01-01", "text or a number"),
        ("chat = 1", "true or false"),
        ('chat = "yes"', "true or false"),
        ("stop = 5", "text or a list of texts"),
        ("stop = [5]", "text or a list of texts"),
    ],
)
def test_a_profile_value_of_the_wrong_type_is_refused(
    line: str, wanted: str, tmp_path: Path
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(line, "utf-8")
    with pytest.raises(UsageError, match=f"{file}: {line.split()[0]} must be {wanted}"):
        config_values(file, "generate", known())


def test_a_profile_takes_one_stop_string_or_several(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('stop = "a b"\nchat = false', "utf-8")
    assert config_values(file, "generate", known()) == {"stop": ["a b"], "chat": False}
    file.write_text('stop = ["a", "b"]', "utf-8")
    assert config_values(file, "generate", known()) == {"stop": ["a", "b"]}


def test_debug_and_quiet_can_be_set_in_the_environment(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tiny_folder: Path
) -> None:
    from kvgen.errors import InputError

    monkeypatch.setenv("KVGEN_QUIET", "1")
    assert cli("generate", "Time", "-m", tiny_folder, "-n", "1").stderr == ""
    monkeypatch.setenv("KVGEN_DEBUG", "1")
    with pytest.raises(InputError):
        cli("generate", "")


@pytest.mark.parametrize("where", ["no", "line", "file"])
def test_quiet_silences_warnings_wherever_it_is_said(
    cli: Cli, tiny_folder: Path, tmp_path: Path, where: str
) -> None:
    from safetensors.torch import load_file, save_file

    folder, config = tmp_path / "model", tmp_path / "quiet.toml"
    shutil.copytree(tiny_folder, folder)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"spare": torch.ones(1)}, folder / "model.safetensors", {"format": "pt"})
    config.write_text("quiet = true", "utf-8")
    asked = {"no": ["-n1"], "line": ["-qn1"], "file": ["-n1", "--config", str(config)]}[where]
    done = cli("generate", "Time", "-m", folder, *asked)
    assert done.returncode == 0
    assert ("has no place for, such as spare" in done.stderr) == (where == "no")
    assert (done.stderr == "") == (where != "no")


def test_kernels_that_no_cpu_has_are_not_recommended(process: Cli, tmp_path: Path) -> None:
    from families import tiny_model
    from tiny import save_tiny_tokenizer

    tiny_model("mamba", vocab_size=257).save_pretrained(tmp_path)
    save_tiny_tokenizer(tmp_path)
    done = process("generate", "Time", "-m", tmp_path, "-n", "2")
    assert (done.returncode, "transformers" in done.stderr) == (0, False)
