"""A hundred moments at which a run is ended: every file is the old one or the new one, whole.

The moments are drawn at random; the seed is printed, and ``KVGEN_TEST_SEED`` sets it.
"""

from __future__ import annotations

import csv
import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from models_gguf import GGUF_VOCAB, write_tiny_gguf
from moments import Ended, Moments
from tiny import save_tiny_llama

from kvgen.measure.cache_file import describe_file
from kvgen.models import store
from kvgen.report.saved import read_comparison

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.name != "posix", reason="forks processes and sends them signals"),
]
SIGNALS = ("SIGINT", "SIGTERM", "SIGKILL")
# SIGTERM simply ends a process that has not come as far as kvgen.
CODES = {"SIGINT": (0, 130), "SIGTERM": (0, 143, -15), "SIGKILL": (0, -9), "SIGPIPE": (0,)}
SEED = int(os.environ.get("KVGEN_TEST_SEED") or random.SystemRandom().randrange(10**6))
COUNT = {"generate": 25, "compare": 15, "convert": 15, "batch": 20, "save": 15, "pipe": 10}


@pytest.fixture
def chance() -> random.Random:
    print(f"KVGEN_TEST_SEED={SEED}")
    return random.Random(SEED)


@pytest.fixture
def moments(tmp_path: Path) -> Iterator[Moments]:
    folder = tmp_path / "program"
    folder.mkdir()
    with Moments(folder) as program:
        yield program


@pytest.fixture
def cache(tmp_path: Path) -> dict[str, str]:
    return {"KVGEN_CACHE_DIR": str(tmp_path / "cache")}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """For results, and nothing else."""
    folder = tmp_path / "results"
    folder.mkdir()
    return folder


def ended_well(ended: Ended, sent: str) -> None:
    """Its exit code is the signal's or that of a run already over, and it said no more than that.

    A process that is killed can say nothing.
    """
    assert ended.code in CODES[sent], (sent, ended)
    assert "Traceback" not in ended.stderr, ended
    assert "internal error" not in ended.stderr


def tidy(folder: Path, sent: str) -> None:
    """Nothing half-written is there; a killed process leaves it under a name nobody reads."""
    left = list(folder.glob(".kvgen-*"))
    assert not left or sent == "SIGKILL"
    for file in left:
        file.unlink()


def test_generate_leaves_the_old_text_or_the_new(
    moments: Moments,
    chance: random.Random,
    cache: dict[str, str],
    tiny_folder: Path,
    folder: Path,
) -> None:
    file = folder / "text"
    line = ["generate", "Time", "-m", tiny_folder, "-n", "100", "--ignore-eos", "-o", file]
    usual = moments.run(line, environment=cache)
    assert usual.code == 0, usual
    whole = file.read_text("utf-8")
    for _ in range(COUNT["generate"]):
        file.write_text("old", "utf-8")
        sent = chance.choice(SIGNALS)
        ended = moments.run(line, sent, chance.uniform(0, usual.seconds * 1.1), cache)
        ended_well(ended, sent)
        text = file.read_text("utf-8")
        # What ended within a character shows the bytes it had of it.
        assert text == "old" or whole.startswith(text.rstrip("\ufffd"))
        tidy(folder, sent)
        assert [path.name for path in folder.iterdir()] == ["text"]
    assert moments.run(line, environment=cache).code == 0
    assert file.read_text("utf-8") == whole


def test_compare_leaves_exports_that_can_be_read(
    moments: Moments,
    chance: random.Random,
    cache: dict[str, str],
    tiny_folder: Path,
    folder: Path,
) -> None:
    result, table, tokens = folder / "r.json", folder / "r.csv", folder / "t.json"
    line = ["compare", "-m", tiny_folder, "-n", "6", "-r", "1", "--depth", "0,8,16"]
    line += [
        "--no-warmup",
        "--prompt-tokens",
        "8",
        "--export",
        result,
        "--export",
        table,
        "--save-tokens",
        tokens,
    ]
    usual = moments.run(line, environment=cache)
    assert usual.code == 0, usual
    for _ in range(COUNT["compare"]):
        sent = chance.choice(SIGNALS)
        ended = moments.run(line, sent, chance.uniform(0, usual.seconds * 1.1), cache)
        ended_well(ended, sent)
        record = read_comparison(result)
        assert not record.complete or len(record.rows) == 3
        with table.open(encoding="utf-8") as opened:
            assert all(None not in row.values() for row in csv.DictReader(opened))
        assert json.loads(tokens.read_text("utf-8"))["schema"] == "kvgen.tokens/1"
        tidy(folder, sent)
    assert moments.run(line, environment=cache).code == 0
    assert read_comparison(result).complete


def test_a_conversion_is_whole_or_not_there(
    moments: Moments,
    chance: random.Random,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "model").mkdir()
    file, place = tmp_path / "tiny.gguf", tmp_path / "cache"
    write_tiny_gguf(file, save_tiny_llama(tmp_path / "model", vocab_size=GGUF_VOCAB))
    monkeypatch.setenv("KVGEN_CACHE_DIR", str(place))
    cache = {"KVGEN_CACHE_DIR": str(place)}
    line = ["generate", "Time", "-m", file, "-n", "2", "--ignore-eos", "-q", "--recompute", "off"]
    usual = moments.run(line, environment=cache)
    assert usual.code == 0, usual
    converted = 0
    for _ in range(COUNT["convert"]):
        shutil.rmtree(place, ignore_errors=True)
        sent = chance.choice(SIGNALS)
        ended = moments.run(line, sent, chance.uniform(0, usual.seconds * 0.6), cache)
        ended_well(ended, sent)
        found = store.find_converted(store.content_hash(file))
        converted += found is not None
        if sent != "SIGKILL":
            assert not list(place.glob("gguf/*.tmp-*"))
        again = moments.run(line, environment=cache)
        assert (again.code, again.stdout) == (0, usual.stdout)
        if found is None:  # whoever converts clears away what was left
            assert not list(place.glob("gguf/*.tmp-*"))
    print(f"{converted} of {COUNT['convert']} conversions were over before they were ended")


def test_batch_goes_on_from_what_it_has(
    moments: Moments,
    chance: random.Random,
    cache: dict[str, str],
    tiny_folder: Path,
    folder: Path,
    tmp_path: Path,
) -> None:
    prompts, results = tmp_path / "prompts.jsonl", folder / "results.jsonl"
    requests = [{"id": n, "prompt": f"Time {n}"} for n in range(12)]
    prompts.write_text("".join(json.dumps(one) + "\n" for one in requests), "utf-8")
    line = ["batch", prompts, "-m", tiny_folder, "-n", "12", "--ignore-eos", "-b", "4"]
    line += ["-o", results]
    usual = moments.run(line, environment=cache)
    assert usual.code == 0, usual

    def texts() -> dict[int, str]:
        lines = results.read_text("utf-8").splitlines() if results.exists() else []
        return {one["id"]: one["text"] for one in map(json.loads, lines)}

    whole = texts()
    assert list(whole) == list(range(12))
    results.unlink()
    for _ in range(COUNT["batch"]):
        sent = chance.choice(SIGNALS)
        after = chance.uniform(0, usual.seconds)
        before = texts()
        ended = moments.run([*line, "--resume"], sent, after, cache)
        ended_well(ended, sent)
        if sent == "SIGKILL" and results.exists():  # the line being written, and no other, may lack
            kept = results.read_bytes()
            results.write_bytes(kept[: kept.rfind(b"\n") + 1])
        held = texts()
        assert before.items() <= held.items() <= whole.items()
        tidy(folder, sent)
        if len(held) == len(whole):
            results.unlink()
    assert moments.run([*line, "--resume"], environment=cache).code == 0
    assert texts() == whole
    assert list(texts()) == list(whole)


def test_a_kept_cache_is_whole_or_not_there(
    moments: Moments,
    chance: random.Random,
    cache: dict[str, str],
    tiny_folder: Path,
    folder: Path,
) -> None:
    file = folder / "kept"
    line = ["cache", "save", "Time flies like an arrow", file, "-m", tiny_folder, "-q"]
    usual = moments.run(line, environment=cache)
    assert usual.code == 0, usual
    for number in range(COUNT["save"]):
        if number % 3 == 0:
            file.unlink(missing_ok=True)
        sent = chance.choice(SIGNALS)
        ended_well(moments.run(line, sent, chance.uniform(0, usual.seconds * 1.1), cache), sent)
        tidy(folder, sent)
        assert not file.exists() or describe_file(file)
    assert moments.run(line, environment=cache).code == 0
    sound = moments.run(["cache", "verify", file, "-m", tiny_folder, "-q"], environment=cache)
    assert sound.code == 0, sound


def test_a_reader_may_leave_at_any_moment(
    moments: Moments, chance: random.Random, cache: dict[str, str], tiny_folder: Path
) -> None:
    line = ["generate", "Time", "-m", tiny_folder, "-n", "100", "--ignore-eos", "-q"]
    usual = moments.run(line, environment=cache)
    for _ in range(COUNT["pipe"]):
        ended = moments.run(line, "SIGPIPE", chance.uniform(0, usual.seconds), cache)
        assert (ended.code, ended.stderr) == (0, "")


def test_the_moments_are_a_hundred() -> None:
    assert sum(COUNT.values()) >= 100
