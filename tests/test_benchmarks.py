"""The benchmark scripts run and print what they promise. No time is judged here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from tiny import save_tiny_llama

SCRIPTS = Path(__file__).parent.parent / "scripts"


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / name), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_appending_is_timed_at_every_length() -> None:
    sizes = ("--lengths", "4", "600", "--appends", "300", "--rounds", "2")
    head, *rows = run("bench-append", *sizes).splitlines()
    assert head.split() == ["held", "appends", "median", "mean", "slowest"]
    assert [row.split()[:2] for row in rows] == [["4", "600"], ["600", "600"]]
    for row in rows:
        middle, average, slowest = (float(number) for number in re.findall(r"([\d.]+) µs", row))
        assert 0 < middle <= slowest
        assert 0 < average <= slowest


def test_starting_is_timed() -> None:
    found = re.search(r"([\d.]+) s of process time \(median of 2", run("bench-startup", "2"))
    assert found
    assert float(found[1]) > 0


def test_a_long_run_is_watched() -> None:
    sizes = ("--tokens", "500", "--requests", "40")
    script = [sys.executable, str(SCRIPTS / "soak"), *sizes]
    done = subprocess.run(script, capture_output=True, text=True, timeout=120, cwd="/")
    assert done.returncode in (0, 1), done.stderr  # the other is about this machine's memory now
    caches = re.findall(r"^ +[\d,]+ +[\d.]+ MiB +(\d+) KiB", done.stdout, re.MULTILINE)
    assert len(caches) == 20
    assert len(set(caches[5:10])) == 1  # a window's cache grows no more
    assert done.stdout.count("bytes more for each of the") == 2


def test_decode_is_compared_side_by_side(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path / "model")
    saved = tmp_path / "bench.json"
    sizes = ("--dtypes", "float32", "--depths", "16,20", "-n", "2", "-r", "1")
    without = ("--no-compile", "--no-slope", "--device", "cpu")
    script = [sys.executable, str(SCRIPTS / "bench"), "-m", str(tmp_path / "model")]
    done = subprocess.run(
        [*script, *sizes, *without, "--json", str(saved)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^\| float32 \| (\d+) \| (\w+) \| [\d.]+ ± [\d.]+ \|", done.stdout, re.M)
    assert rows == [(depth, name) for depth in ("16", "20") for name in ("kvgen", "generate")]
    run = json.loads(saved.read_text())["runs"]["float32"]
    assert [row["depth"] for row in run["rows"]] == [0, 4]  # the first 16 tokens come on top
    assert "llama.cpp is measured on the default model only" in done.stderr
