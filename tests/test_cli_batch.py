"""``kvgen batch`` as a command: lines in, lines out, and nothing lost when it is ended midway."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from conftest import Cli

from kvgen.engine.batch import RowBatch
from kvgen.errors import ModelError
from kvgen.report.document import schema

START = "It was a bright cold day in April"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Ten prompts that begin alike and ask for different lengths."""
    lines = [
        {"id": f"p{i}", "prompt": f"{START} {i}", "max_new_tokens": 3 + 7 * i % 11}
        for i in range(10)
    ]
    return write(tmp_path / "prompts.jsonl", *lines)


def write(path: Path, *lines: Any) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(text + "\n" for text in texts), "utf-8")
    return path


def results(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def lasting(text: str) -> list[dict[str, Any]]:
    """What every run of the same prompts gives: all but its own costs."""
    return [
        {name: value for name, value in line.items() if name not in ("receipt", "timing")}
        for line in results(text)
    ]


def test_lines_come_in_the_order_of_the_prompts_and_follow_the_schema(
    cli: Cli, tiny_folder: Path, prompts: Path
) -> None:
    done = cli("batch", prompts, "-m", tiny_folder, "-b", "3", "--ignore-eos")
    assert done.returncode == 0
    lines = results(done.stdout)
    for line in lines:
        jsonschema.validate(line, schema("batch-1"))
    assert [line["id"] for line in lines] == [f"p{i}" for i in range(10)]
    assert [len(line["new_ids"]) for line in lines] == [3 + 7 * i % 11 for i in range(10)]
    assert "10 prompts, " in done.stderr
    assert "up to 3 rows at a time" in done.stderr
    receipts = [line["receipt"] for line in lines]
    total = sum(receipt["computed"] for receipt in receipts)
    assert f"{total:,} computed" in done.stderr
    assert receipts[1]["reused"] == len(START) + 1  # byte-level tokens


def test_a_row_is_what_generate_gives(cli: Cli, tiny_folder: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "in", {"prompt": START}, {"prompt": START[:9], "stop": ["a", "e"]})
    options = ("-m", tiny_folder, "-n", "12", "--temperature", "1", "--seed", "5", "--dtype")
    first, second = results(cli("batch", file, *options, "float32").stdout)
    for line, prompt, stops in ((first, START, []), (second, START[:9], ["a", "e"])):
        stop = [part for text in stops for part in ("--stop", text)]
        done = cli(
            *("generate", prompt, *options[:-3], "--seed", line["seed"], *stop),
            *("--format", "json", "--quiet", "--recompute", "off"),
        )
        alone = json.loads(done.stdout)
        assert [step["token_id"] for step in alone["steps"]] == line["new_ids"]
        assert (alone["text"], alone["finish_reason"]) == (line["text"], line["finish_reason"])
        assert line["id"] in (1, 2)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "is not JSON"),
        ("[1]", "is no JSON object"),
        ({"prompt": "a", "bogus": 1}, "unknown field 'bogus'; there are id, prompt, messages, "),
        ({"prompt": "a", "max_tokens": 3}, "unknown field 'max_tokens'; the nearest is 'max_new"),
        ({"id": "x"}, "needs a prompt or messages"),
        ({"prompt": "a", "messages": []}, "needs a prompt or messages, and not both"),
        ({"messages": ["a"]}, "has messages that are not a list of"),
        ({"messages": [{"role": "user"}]}, "has messages that are not a list of"),
        ({"prompt": 3}, "has prompt = 3, which is not text"),
        ({"prompt": "a", "id": True}, "has id = true, which is not text or a whole"),
        ({"prompt": "a", "max_new_tokens": 0}, "less than 1 new token"),
        ({"prompt": "a", "seed": -1}, "has a seed"),
        ({"prompt": "a", "stop": 3}, "has a stop"),
        ({"prompt": "a", "chat": "yes"}, "has a chat"),
        ({"prompt": "a", "chat": False, "system": "s"}, "has a system message"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": "a", "chat": True}, "no chat template"),
        ({"prompt": "a" * 200}, "the prompt has 200 tokens"),
        ({"prompt": "a", "max_new_tokens": 500}, "do not fit the model's context"),
        ('{"prompt": "\\ud800"}', "half of a surrogate pair"),
    ],
)
def test_a_bad_line_is_reported_and_skipped(
    cli: Cli, tiny_folder: Path, tmp_path: Path, line: Any, reason: str
) -> None:
    file = write(tmp_path / "in.jsonl", {"prompt": "one"}, "", line, {"prompt": "two"})
    done = cli("batch", file, "-m", tiny_folder, "-n", "2")
    assert done.returncode == 4
    assert f"kvgen: {file}:3: " in done.stderr
    assert reason in done.stderr
    assert done.stderr.splitlines()[-1] == "kvgen: 1 line was skipped; all others are done"
    assert [line["id"] for line in results(done.stdout)] == [1, 4]


def test_a_line_that_is_no_text_is_reported_and_skipped(
    cli: Cli, tiny_folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "one"}\r\n\xff\n{"prompt": "two"}')
    done = cli("batch", file, "-m", tiny_folder, "-n", "2", "--quiet")
    assert done.returncode == 4
    assert "in.jsonl:2: is not UTF-8 text" in done.stderr
    assert len(results(done.stdout)) == 2


@pytest.mark.parametrize(
    ("lines", "options", "code", "message"),
    [
        ([], [], 4, "holds no prompts"),
        ([{"id": 1, "prompt": "a"}, {"prompt": "b"}, {"id": 2, "prompt": "c"}], [], 2, "have the"),
        ([{"prompt": "a"}], ["--resume"], 2, "--resume goes on with a file"),
        ([{"prompt": "a"}], ["-o", "."], 2, "cannot write ."),
        ([{"prompt": "a"}], ["--prefix-budget", "much"], 2, "expected a size"),
        ([{"prompt": "a"}], ["--prefix-budget", "1MiB", "--no-share-prefix"], 2, "leave out"),
        ([{"prompt": "a"}], ["--cache", "nothing"], 2, "unknown cache"),
        ([{"prompt": "a"}], ["--top-k", "3"], 2, "--top-k has no effect"),
        ([{"prompt": "a"}], ["-b", "0"], 2, "--batch-size"),
    ],
)
def test_what_cannot_be_meant_is_one_line(
    cli: Cli, tiny_folder: Path, tmp_path: Path, lines: Any, options: Any, code: int, message: str
) -> None:
    file = write(tmp_path / "in.jsonl", *lines)
    done = cli("batch", file, "-m", tiny_folder, *options)
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_an_error_midway_keeps_the_rows_that_are_finished(
    cli: Cli, tiny_folder: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("batch", prompts, "-m", tiny_folder, "-b", "4", "--ignore-eos")
    whole = lasting(cli(*command).stdout)
    step, left = RowBatch.step, 9

    def broken(batch: RowBatch) -> list[int]:
        nonlocal left
        left -= 1
        if not left:
            raise ModelError("the model's logits are not finite numbers")
        return step(batch)

    monkeypatch.setattr(RowBatch, "step", broken)
    done = cli(*command)
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1] == "kvgen: the model's logits are not finite numbers"
    kept = lasting(done.stdout)
    assert 0 < len(kept) < 10
    assert kept == [line for line in whole if line in kept]


def test_a_file_that_is_not_there_is_named(cli: Cli, tmp_path: Path) -> None:
    done = cli("batch", tmp_path / "none.jsonl")
    assert done.returncode == 2
    assert "none.jsonl: No such file" in done.stderr


def test_a_file_of_results_is_taken_up_only_where_it_is_meant(
    cli: Cli, tiny_folder: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    command = ("batch", prompts, "-m", tiny_folder, "-b", "4", "-o", out)
    assert cli(*command).returncode == 0
    whole = out.read_bytes()
    refused = cli(*command)
    assert refused.returncode == 2
    assert "is there already; go on with it (--resume)" in refused.stderr
    other = cli(*command, "--resume", "--ignore-eos")
    assert other.returncode == 2
    assert "made from a prompt or settings that differ" in other.stderr
    again = cli(*command, "--resume")
    assert again.returncode == 0
    assert "0 prompts (10 more were finished before)" in again.stderr
    assert out.read_bytes() == whole
    out.write_bytes(b'{"schema": "else"}\n')
    foreign = cli(*command, "--resume")
    assert foreign.returncode == 2
    assert "its line 1 is no result of kvgen batch" in foreign.stderr
    assert out.read_bytes() == b'{"schema": "else"}\n'


def test_half_a_line_is_cut_and_run_again(
    cli: Cli, tiny_folder: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    command = ("batch", prompts, "-m", tiny_folder, "-b", "4", "-o", out)
    cli(*command)
    whole = out.read_text("utf-8")
    lines = whole.splitlines(keepends=True)
    out.write_text("".join(lines[5:8] + lines[:3]) + lines[3][:50], "utf-8")
    done = cli(*command, "--resume")
    assert done.returncode == 0
    assert "4 prompts (6 more were finished before)" in done.stderr
    assert lasting(out.read_text("utf-8")) == lasting(whole)


@pytest.mark.parametrize("to_file", [True, False])
def test_ctrl_c_keeps_the_rows_that_are_finished(
    cli: Cli,
    tiny_folder: Path,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    to_file: bool,
) -> None:
    command = ["batch", prompts, "-m", tiny_folder, "-b", "4", "--ignore-eos"]
    whole = lasting(cli(*command).stdout)
    step, left = RowBatch.step, 9

    def interrupted(batch: RowBatch) -> list[int]:
        nonlocal left
        left -= 1
        if not left:
            raise KeyboardInterrupt
        return step(batch)

    monkeypatch.setattr(RowBatch, "step", interrupted)
    out = tmp_path / "out.jsonl"
    done = cli(*command, *(["-o", out] if to_file else []))
    assert done.returncode == 130
    kept = lasting(out.read_text("utf-8") if to_file else done.stdout)
    assert 0 < len(kept) < len(whole)
    assert kept == [line for line in whole if line in kept]
    assert f"interrupted with {10 - len(kept)} prompts to go" in done.stderr
    if to_file:
        monkeypatch.undo()
        assert cli(*command, "-o", out, "--resume").returncode == 0
        assert lasting(out.read_text("utf-8")) == whole


def test_a_kill_at_any_moment_and_a_resume_give_the_file_of_an_unbroken_run(
    cli: Cli, tiny_folder: Path, tmp_path: Path
) -> None:
    lines = [
        {"id": i, "prompt": f"{START} {i % 37}", "max_new_tokens": 5 + 13 * i % 60}
        for i in range(150)
    ]
    file = write(tmp_path / "in.jsonl", *lines)
    out = tmp_path / "out.jsonl"
    command = ["batch", file, "-m", tiny_folder, "-b", "4", "--ignore-eos"]
    command += ["--temperature", "1", "--seed", "1"]
    whole = lasting(cli(*command).stdout)

    line = [sys.executable, "-m", "kvgen", *map(str, command), "-o", str(out)]
    killed = subprocess.Popen(line, stderr=subprocess.DEVNULL)
    enough = random.Random().randrange(1, 80)
    while killed.poll() is None and not (out.exists() and out.read_bytes().count(b"\n") >= enough):
        time.sleep(0.005)
    killed.kill()
    killed.wait()
    finished = out.read_bytes().count(b"\n")
    assert enough <= finished < 150, "the kill came too late to tell anything"

    done = cli(*command, "-o", out, "--resume")
    assert done.returncode == 0
    assert f"{150 - finished:,} prompts ({finished} more were finished before)" in done.stderr
    assert lasting(out.read_text("utf-8")) == whole


def test_stdin_a_pipe_and_a_device_serve_as_well(
    process: Any, tiny_folder: Path, prompts: Path
) -> None:
    text = prompts.read_text("utf-8")
    done = process("batch", "-", "-m", tiny_folder, "-o", "/dev/stdout", "-q", stdin=text)
    assert done.returncode == 0
    assert done.stderr == ""
    assert [line["id"] for line in results(done.stdout)] == [f"p{i}" for i in range(10)]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_one_line(cli: Cli, tiny_folder: Path, prompts: Path) -> None:
    done = cli("batch", prompts, "-m", tiny_folder, "-o", "/dev/full")
    assert done.returncode == 1
    assert "cannot write /dev/full: No space left on device" in done.stderr.splitlines()[-1]


def test_a_real_ctrl_c_ends_with_130_and_whole_lines(tiny_folder: Path, tmp_path: Path) -> None:
    lines = [{"prompt": f"{START} {i}", "max_new_tokens": 90} for i in range(400)]
    file, out = write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    line = [sys.executable, "-m", "kvgen", "batch", str(file), "-m", str(tiny_folder), "-q"]
    running = subprocess.Popen([*line, "--ignore-eos", "-o", str(out)], stderr=subprocess.PIPE)
    while running.poll() is None and not (out.exists() and out.stat().st_size):
        time.sleep(0.01)
    os.kill(running.pid, signal.SIGINT)
    _, stderr = running.communicate(timeout=60)
    assert running.returncode == 130
    assert b"Traceback" not in stderr
    assert 0 < len(results(out.read_text("utf-8"))) < 400


DOCS = (Path(__file__).parent.parent / "docs" / "batch.md").read_text("utf-8")


@pytest.mark.real
def test_the_documentation_runs_as_it_stands(tmp_path: Path, capfd: Any) -> None:
    (script,) = re.findall(r"```sh\n(.*?)```", DOCS, re.DOTALL)
    (tmp_path / "kvgen").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m kvgen "$@"\n', "utf-8")
    (tmp_path / "kvgen").chmod(0o755)
    modules = os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "PYTHONPATH": modules}
    subprocess.run(["sh", "-ec", script], cwd=tmp_path, env=environment, check=True, timeout=120)
    captured = DOCS.split("```text\n", 1)[1].split("```", 1)[0].splitlines()
    assert captured[2] in capfd.readouterr().err.splitlines()
    lines = results((tmp_path / "answers.jsonl").read_text("utf-8"))
    assert [line["id"] for line in lines] == ["arrow", "fruit", "hello"]


@pytest.mark.real
def test_the_documented_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)
    exec(compile(example, "batch.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) >= 4


def test_every_field_of_a_line_is_documented() -> None:
    from kvgen.measure.requests import _FIELDS

    assert all(f"`{name}`" in DOCS for name in _FIELDS)
