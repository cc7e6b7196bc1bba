"""What may be used of a machine: affinity, physical cores, and the quotas of containers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import Cli

from kvgen import machine
from kvgen.cli import options
from kvgen.machine import default_threads, usable_cores


@pytest.fixture(autouse=True)
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight processors that this process may run on."""
    monkeypatch.setattr(machine, "_affinity", lambda: set(range(8)))


def write(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content + "\n")
    return root


def test_without_a_quota_every_processor_is_usable(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == default_threads(tmp_path) == 8


def test_processors_that_share_a_core_count_once_as_threads(tmp_path: Path) -> None:
    topology = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    root = write(tmp_path, {topology.format(i): f"{i % 4},{i % 4 + 4}" for i in range(8)})
    assert (usable_cores(root), default_threads(root)) == (8, 4)


@pytest.mark.parametrize(
    ("limit", "cores", "threads"),
    [
        ("150000 100000", 2, 1),
        ("50000 100000", 1, 1),
        ("400000 100000", 4, 4),
        ("max 100000", 8, 8),
    ],
)
def test_a_quota_of_version_2_counts(tmp_path: Path, limit: str, cores: int, threads: int) -> None:
    root = write(tmp_path, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": limit})
    assert (usable_cores(root), default_threads(root)) == (cores, threads)


def test_the_tightest_of_the_groups_above_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/outer/inner",
        "sys/fs/cgroup/outer/inner/cpu.max": "600000 100000",
        "sys/fs/cgroup/outer/cpu.max": "300000 100000",
        "sys/fs/cgroup/cpu.max": "max 100000",
    }
    assert usable_cores(write(tmp_path, files)) == 3


@pytest.mark.parametrize(("quota", "cores"), [("250000", 3), ("-1", 8)])
def test_a_quota_of_version_1_counts(tmp_path: Path, quota: str, cores: int) -> None:
    files = {
        "proc/self/cgroup": "5:memory:/box\n4:cpu,cpuacct:/box",
        "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": quota,
        "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000",
    }
    assert usable_cores(write(tmp_path, files)) == cores


@pytest.mark.parametrize("limit", ["", "nonsense", "0 0", "100000 0", "-5 100000"])
def test_a_quota_that_cannot_be_read_is_none(tmp_path: Path, limit: str) -> None:
    root = write(tmp_path, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": limit})
    assert usable_cores(root) == 8


def test_threads_are_as_many_as_help_unless_the_environment_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setattr(options, "default_threads", lambda: 4)
    options.use_threads(None)  # the tests set OMP_NUM_THREADS
    monkeypatch.delenv("OMP_NUM_THREADS")
    options.use_threads(None)
    options.use_threads(3)
    assert asked == [4, 3]


def test_more_threads_than_can_be_used_are_refused(
    cli: Cli, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "usable_cores", lambda: 2)
    done = cli("generate", "Time", "-m", tiny_folder, "--threads", "3")
    assert done.returncode == 2
    assert done.stderr == "kvgen: --threads 3: 2 can be used here; choose at most that\n"
