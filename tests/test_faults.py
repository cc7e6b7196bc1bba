"""Faults around kvgen: full disks, places that cannot be written, many at once, no network.

What can go on without the disk goes on; the rest ends in one line.
"""

from __future__ import annotations

import os
import pickle
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Cli
from models_gguf import GGUF_VOCAB, write_tiny_gguf
from moments import Moments
from tiny import save_tiny_llama

from kvgen.storage import make_private, write_atomically


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    file = tmp_path / "tiny.gguf"
    write_tiny_gguf(file, save_tiny_llama(tmp_path / "model", vocab_size=GGUF_VOCAB))
    return file


def kvgen(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "kvgen", *map(str, words)]


# A full disk


def on_small_disk(place: Path, size: str, line: str, **environment: str) -> tuple[int, str, str]:
    """Run a shell line in a namespace of its own, in which ``place`` is a disk of ``size``."""
    mount = f"mount -t tmpfs -o size={size},mode=0700 none {place}"
    if shutil.which("unshare") is None:
        pytest.skip("this system has no unshare, which a disk of one's own needs")
    who = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-r", "-m"]
    if subprocess.run([*who, "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("a small disk cannot be mounted here")
    done = subprocess.run(
        [*who, "sh", "-c", f"{mount} && {line}"],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=os.getcwd(),
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_a_conversion_that_does_not_fit_the_disk_says_so_and_leaves_nothing(
    gguf: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    line = " ".join(kvgen("generate", "x", "-q", "-m", gguf))
    code, out, errors = on_small_disk(
        disk,
        "1m",
        f"{line}; code=$?; find {disk} -name '*.tmp-*'; exit $code",
        KVGEN_CACHE_DIR=str(disk),
    )
    assert (code, out) == (3, "")
    assert errors.count("\n") == 1
    assert "is full" in errors
    assert "KVGEN_CACHE_DIR" in errors


@pytest.mark.slow
def test_a_disk_that_fills_up_while_a_result_is_written_keeps_the_old_one(
    tiny_folder: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    file = disk / "r.json"
    line = " ".join(
        kvgen(
            "generate",
            "x",
            "-q",
            "-m",
            tiny_folder,
            "-n",
            "99",
            "--ignore-eos",
            "-f",
            "json",
            "-o",
            file,
            "--no-warmup",
        )
    )
    code, out, errors = on_small_disk(
        disk, "16k", f"echo old > {file}; {line}; code=$?; cat {file}; ls -A {disk}; exit $code"
    )
    assert code == 1
    assert errors == f"kvgen: cannot write {file}: No space left on device\n"
    assert out.split() == ["old", "r.json"]


@pytest.mark.slow
def test_kept_results_and_the_text_survive_a_file_that_may_not_grow(
    tiny_folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "batch.jsonl"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "a", "prompt": "x"}\n{"id": "b", "prompt": "y"}\n', "utf-8")
    code = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (700, resource.RLIM_INFINITY))\n"
        "from kvgen.__main__ import main\n"
        "sys.argv = ['kvgen', *sys.argv[1:]]\n"
        "main()\n"
    )
    line = ["batch", str(prompts), "-m", str(tiny_folder), "-n", "9", "-o", str(file), "-q"]
    done = subprocess.run(
        [sys.executable, "-c", code, *line], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "--resume goes on" in done.stderr
    again = subprocess.run(kvgen(*line, "--resume"), capture_output=True, text=True, timeout=120)
    assert again.returncode == 0, again.stderr
    assert len(file.read_text("utf-8").splitlines()) == 2


# Places that cannot be written, or are not there


@pytest.mark.parametrize("home", ["/dev/null/home", "", None])
def test_without_a_home_or_a_cache_folder_a_model_runs_all_the_same(
    cli: Cli, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, home: str | None
) -> None:
    monkeypatch.delenv("KVGEN_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/cache")
    if home is None:
        monkeypatch.delenv("HOME", raising=False)
    else:
        monkeypatch.setenv("HOME", home)
    done = cli("generate", "x", "-m", tiny_folder, "-n", "2", "-q", "--ignore-eos")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_a_cache_folder_that_is_read_only_costs_a_warning_and_no_more(
    cli: Cli, gguf: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVGEN_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    real = os.access
    # The tests may run as the one user whom no permission stops.
    monkeypatch.setattr("os.access", lambda path, mode: mode == os.R_OK and real(path, mode))
    done = cli("generate", "x", "-m", gguf, "-n", "2", "--no-stats", "--ignore-eos")
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert "converting for this run only" in done.stderr
    assert "KVGEN_CACHE_DIR" in done.stderr
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_what_is_written_for_one_user_is_for_no_other(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_private(tmp_path / "a" / "cache")
        write_atomically(tmp_path / "a" / "cache" / "file", "x")
    finally:
        os.umask(before)
    assert (tmp_path / "a" / "cache").stat().st_mode & 0o077 == 0


# Many at once


@pytest.mark.slow
def test_eight_processes_at_once_convert_once_and_all_work(gguf: Path, tmp_path: Path) -> None:
    code = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch, transformers.models.auto.modeling_auto, transformers.models.llama.modeling_llama
import gguf as library, kvgen.measure.run
from kvgen.cli.main import run
from kvgen.models import gguf
write_folder = gguf._write_folder
def logged(*arguments):
    with open(sys.argv[2], "a") as log: log.write("converted\\n")
    write_folder(*arguments)
gguf._write_folder = logged
children = []
for number in range(8):
    child = os.fork()
    if not child:
        os.dup2(os.open(f"{{sys.argv[2]}}-{{number}}", os.O_CREAT | os.O_WRONLY), 1)
        code = run(["generate", "x", "-m", sys.argv[1], "-n", "3", "--ignore-eos", "-q"])
        sys.stdout.flush()
        os._exit(code)
    children.append(child)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
sys.exit(0 if codes == [0] * 8 else f"exit codes {{codes}}")
"""
    log = tmp_path / "log"
    done = subprocess.run(
        [sys.executable, "-c", code, str(gguf), str(log)],
        env=os.environ | {"KVGEN_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    assert log.read_text("utf-8") == "converted\n"
    texts = {(tmp_path / f"log-{number}").read_bytes() for number in range(8)}
    assert len(texts) == 1
    assert texts != {b""}


@pytest.mark.slow
def test_the_same_command_gives_the_same_bytes(tiny_folder: Path) -> None:
    line = kvgen("generate", "Time", "-m", tiny_folder, "-n", "40", "--ignore-eos", "-q")
    line += ["--temperature", "1.2", "--top-p", "0.9", "--seed", "7", "--threads", "1"]
    texts = {
        subprocess.run(
            line, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, timeout=120
        ).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1
    assert texts != {b""}


# Without a network


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Sockets that note who wanted to connect, and where, and refuse."""
    import huggingface_hub.constants

    wanted: list[Any] = []

    def refuse(self: Any, *address: Any) -> None:
        wanted.append(address)
        raise OSError(101, "Network is unreachable")

    def unknown(*name: Any, **_: Any) -> None:
        wanted.append(name)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr(socket, "create_connection", unknown)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    return wanted


@pytest.mark.parametrize(
    "line",
    [
        ("generate", "x", "-n", "2", "-q", "-m"),
        ("compare", "-n", "2", "-r", "1", "--prompt-tokens", "4", "-q", "-m"),
        ("explain", "x", "-n", "2", "-q", "--no-timings", "-m"),
        ("verify", "--quick", "-q", "-m"),
        ("size",),
    ],
    ids=lambda line: line[0],
)
def test_offline_nothing_is_asked_of_the_network(
    cli: Cli, tiny_folder: Path, no_network: list[Any], line: tuple[str, ...]
) -> None:
    assert cli(*line, tiny_folder, "--offline").returncode == 0
    done = cli(*line, "nobody/nothing", "--offline")
    assert done.returncode == 3
    assert "offline mode is on" in done.stderr
    assert no_network == []


@pytest.mark.parametrize("line", [("generate", "x", "-m"), ("size",)], ids=lambda line: line[0])
def test_an_unknown_model_without_a_network_is_refused_at_once(
    cli: Cli,
    no_network: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    line: tuple[str, ...],
) -> None:
    def never(seconds: float) -> None:
        pytest.fail(f"waited {seconds} s to try again")

    monkeypatch.setattr("time.sleep", never)
    done = cli(*line, "nobody/nothing")
    assert (done.returncode, done.stdout) == (3, "")
    assert "cannot be reached" in done.stderr
    assert done.stderr.count("\n") == 1
    assert no_network


# Code that is not run


def test_no_file_of_a_model_is_unpickled(
    cli: Cli, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pickles lie beside the weights; nothing opens them, and nothing is unpickled at all."""
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "model"))
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt"):
        (folder / name).write_bytes(b"\x80\x04cos\nsystem\n.")

    def refuse(*_: Any, **__: Any) -> None:
        pytest.fail("something was unpickled")

    monkeypatch.setattr(pickle, "load", refuse)
    monkeypatch.setattr(pickle, "loads", refuse)
    monkeypatch.setattr("torch.load", refuse)
    assert cli("generate", "x", "-m", folder, "-n", "2", "-q").returncode == 0


@pytest.mark.skipif(os.name != "posix", reason="forks processes")
def test_sigterm_keeps_the_text_and_exits_143(tiny_folder: Path, tmp_path: Path) -> None:
    line = ["generate", "Time", "-m", tiny_folder, "-n", "120", "--ignore-eos"]
    with Moments(tmp_path) as moments:
        usual = moments.run(line)
        found = [moments.run(line, "SIGTERM", usual.seconds * part / 8) for part in range(2, 8)]
    assert usual.code == 0
    assert {ended.code for ended in found} <= {0, 143}
    ended = [one for one in found if one.code == 143]
    assert ended
    for one in ended:
        # What ended within a character shows the bytes it had of it.
        assert usual.stdout.startswith(one.stdout.rstrip("\ufffd"))
        assert "Traceback" not in one.stderr
