"""The benchmark scripts run and print what they promise. No time is judged here."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

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
    assert len(set(caches[:10])) == 1  # a window's cache grows no more
    assert done.stdout.count("bytes more for each of the") == 2
