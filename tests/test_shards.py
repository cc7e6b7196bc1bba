"""A batch in shards: every prompt in one of them, alike ones together, and all merged in order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Cli

from kvgen.errors import UsageError
from kvgen.measure.requests import Request
from kvgen.measure.shards import merged, shard_of


def requests_of(*prompts: str) -> list[Request]:
    return [Request(id=index, prompt=prompt) for index, prompt in enumerate(prompts)]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 40])
def test_every_prompt_is_in_one_shard_in_its_order(count: int) -> None:
    every = requests_of(*(f"{'abc'[i % 3] * (i % 5)} {i}" for i in range(30)))
    shards = [[r.id for r in shard_of(every, index, count)] for index in range(1, count + 1)]
    assert sorted(key for shard in shards for key in shard) == list(range(30))
    assert all(shard == sorted(shard) for shard in shards)
    assert max(map(len, shards)) <= 1.5 * 30 / count + 1


def test_prompts_that_begin_alike_go_to_one_shard() -> None:
    groups = {"A common beginning, ": 9, "Once upon a time ": 11, "In the year ": 10, "To be ": 10}
    every = [f"{group}{i}" for i in range(12) for group, size in groups.items() if i < size]
    for index in range(1, 5):
        found = {str(r.prompt)[:4] for r in shard_of(requests_of(*every), index, 4)}
        assert len(found) == 1


def test_results_are_merged_once_each_in_the_order_of_the_prompts() -> None:
    every = requests_of("a", "b", "c")
    lines, missing = merged(every, [("x", {2: b"C"}), ("y", {0: b"A"})])
    assert (lines, missing) == ([b"A", b"C"], [every[1]])
    with pytest.raises(UsageError, match="both x and y have a result with the id 0"):
        merged(every, [("x", {0: b"A"}), ("y", {0: b"A"})])
    with pytest.raises(UsageError, match="x has a result with the id 7, which no prompt has"):
        merged(every, [("x", {7: b"?"})])


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    texts = [f"{'Time flies' if i % 2 else 'Once upon'} {i}" for i in range(9)]
    lines = [json.dumps({"id": f"p{i}", "prompt": text}) for i, text in enumerate(texts)]
    file.write_text("\n".join([*lines[:5], "no JSON", *lines[5:]]) + "\n", "utf-8")
    return file


def results(file: Path) -> list[dict[str, Any]]:
    """Lines without what differs from run to run."""
    rows = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    return [{k: v for k, v in row.items() if k not in ("receipt", "timing")} for row in rows]


def test_shards_merged_equal_one_run(
    cli: Cli, tiny_folder: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ("batch", prompts, "-m", tiny_folder, "-n", "4", "--quiet")
    assert cli(*line, "-o", tmp_path / "all").returncode == 4  # a line was skipped
    skipped = [cli(*line, "-o", tmp_path / f"s{i}", "--shard", f"{i}/4") for i in range(1, 5)]
    assert [done.returncode for done in skipped] == [4, 0, 0, 0]
    parts = [tmp_path / f"s{i}" for i in range(4, 0, -1)]
    done = cli("batch", "--merge", prompts, *parts, "-o", tmp_path / "merged")
    assert (done.returncode, done.stderr) == (0, "")
    assert results(tmp_path / "merged") == results(tmp_path / "all")

    short = cli("batch", "--merge", prompts, *parts[1:])
    assert short.returncode == 4
    assert "of 9 prompts have no result, first the one with the id" in short.stderr
    assert cli("batch", "--merge", prompts, parts[0], parts[0]).returncode == 2

    last = parts[0].read_bytes()  # of a part that lost its last line break, and of one doubled
    parts[0].write_bytes(last.rstrip())
    assert cli("batch", "--merge", prompts, *parts, "-o", tmp_path / "again").returncode == 0
    assert results(tmp_path / "again") == results(tmp_path / "all")
    parts[0].write_bytes(2 * last)
    assert "has two results with the id" in cli("batch", "--merge", prompts, *parts).stderr
    own = cli("batch", "--merge", prompts, *parts, "-o", parts[0])
    assert (own.returncode, parts[0].read_bytes()) == (2, 2 * last)
    assert "is one of the files to merge" in own.stderr

    # As a rank of torchrun, without a word about shards.
    for name, value in (("RANK", 1), ("WORLD_SIZE", 4), ("MASTER_ADDR", "x"), ("MASTER_PORT", 1)):
        monkeypatch.setenv(name, str(value))
    assert cli(*line, "-o", tmp_path / "ranks").returncode == 0
    assert results(tmp_path / "ranks.2-of-4") == results(tmp_path / "s2")
    assert "ranks cannot share stdin and stdout" in cli(*line).stderr
    assert cli("batch", "-", "-o", tmp_path / "x").returncode == 2
    assert "leave out --shard" in cli(*line, "-o", tmp_path / "y", "--shard", "1/4").stderr


def test_a_result_of_a_prompt_that_was_changed_since_is_not_merged(
    cli: Cli, tmp_path: Path
) -> None:
    prompts, part = tmp_path / "prompts.jsonl", tmp_path / "part"
    prompts.write_text('{"id": "a", "prompt": "Time flies"}\n', "utf-8")
    asked = Request("a", prompt="Time flies", line=7)  # where it stands does not matter
    result = {"schema": "kvgen.batch/1", "id": "a", "request": "x", "input": asked.digest}
    part.write_text(json.dumps(result) + "\n", "utf-8")
    assert cli("batch", "--merge", prompts, part).stdout == part.read_text("utf-8")
    prompts.write_text('{"id": "a", "prompt": "Time flew"}\n', "utf-8")
    done = cli("batch", "--merge", prompts, part)
    assert (done.returncode, done.stdout) == (2, "")
    assert 'has a result with the id "a", and its line of prompts was changed' in done.stderr
    del result["input"]  # as earlier versions wrote it
    part.write_text(json.dumps(result) + "\n", "utf-8")
    assert cli("batch", "--merge", prompts, part).returncode == 0


@pytest.mark.parametrize("shard", ["0/4", "5/4", "4", "1/0", "x/4", "-1/4"])
def test_a_shard_that_is_none_is_refused(cli: Cli, prompts: Path, shard: str) -> None:
    done = cli("batch", prompts, "--shard", shard)
    assert done.returncode == 2
    assert "expected a shard of all, such as 1/4 to 4/4" in done.stderr


def test_files_of_results_need_merge(cli: Cli, prompts: Path, tmp_path: Path) -> None:
    assert "one file of prompts at a time" in cli("batch", prompts, prompts).stderr
    other = tmp_path / "other"
    no_id = '{"schema": "kvgen.batch/1", "id": [1], "request": "x"}'
    for line in ("{}", no_id):
        other.write_text(line + "\n", "utf-8")
        done = cli("batch", "--merge", prompts, other)
        assert done.returncode == 2
        assert f"cannot merge {other}: its line 1 is no result of kvgen batch" in done.stderr
    assert "cannot read" in cli("batch", "--merge", prompts, tmp_path / "absent").stderr
    assert "--merge needs the files of results" in cli("batch", "--merge", prompts).stderr
    assert "--merge runs nothing" in cli("batch", "--merge", prompts, "--shard", "1/2").stderr
