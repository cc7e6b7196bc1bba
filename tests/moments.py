"""Runs kvgen in forked processes and ends them at given moments, so that one import serves all.

A program of its own, because a process with threads must not be forked: reads one JSON job a line
and answers each with one JSON line.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

LIMIT_S = 60.0
"""A process that has not ended by then hangs."""


class Ended(NamedTuple):
    """What one process left: its exit code (negative: the signal that killed it) and streams."""

    code: int
    stdout: str
    stderr: str
    seconds: float


class Moments:
    """The program, started; use it as a context."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> Moments:
        path = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
        self._program = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=self._folder,
            env=os.environ | {"PYTHONPATH": path},
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._program.stdin is not None
        self._program.stdin.close()
        self._program.wait(LIMIT_S)

    def run(
        self,
        line: Sequence[str | Path],
        sent: str | None = None,
        after_s: float = 0.0,
        environment: dict[str, str] | None = None,
    ) -> Ended:
        """Run a command line; ``sent`` is a signal's name, or ``SIGPIPE``: its reader leaves."""
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        job = {
            "line": [str(word) for word in line],
            "sent": sent,
            "after_s": after_s,
            "environment": environment or {},
        }
        print(json.dumps(job), file=self._program.stdin, flush=True)
        return Ended(*json.loads(self._program.stdout.readline()))


def _serve() -> None:
    """Import what a run imports, then answer job after job."""
    import tokenizers  # noqa: F401
    import torch
    import transformers.models.auto.modeling_auto
    import transformers.models.llama.modeling_llama  # noqa: F401

    import kvgen.cli.comparing
    import kvgen.cli.main
    import kvgen.measure.run  # noqa: F401

    assert torch.get_num_threads() == 1, "a pool of threads does not survive a fork"
    for text in sys.stdin:
        print(json.dumps(_run(json.loads(text))), flush=True)


def _run(job: dict[str, Any]) -> list[Any]:
    out, err = Path(f"out-{os.getpid()}"), Path(f"err-{os.getpid()}")
    reading, writing = os.pipe() if job["sent"] == "SIGPIPE" else (-1, -1)
    began = time.monotonic()
    child = os.fork()
    if not child:
        try:
            if reading >= 0:
                os.close(reading)
            _become(job, out, err, writing)
        finally:
            os._exit(98)
    if writing >= 0:
        os.close(writing)
    if job["sent"]:
        time.sleep(max(job["after_s"], 0.01))
        if reading >= 0:
            os.close(reading)
        else:
            os.kill(child, getattr(signal, job["sent"]))
    status = 0
    while time.monotonic() - began < LIMIT_S:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.002)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        err.write_text("it hangs", "utf-8")
    seconds = time.monotonic() - began
    read = [file.read_text("utf-8", "replace") if file.exists() else "" for file in (out, err)]
    return [os.waitstatus_to_exitcode(status), *read, seconds]


def _become(job: dict[str, Any], out: Path, err: Path, writing: int) -> None:
    """Be the command line's process, to its end."""
    code = 99
    try:
        flags = os.O_CREAT | os.O_TRUNC | os.O_WRONLY
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(writing if writing >= 0 else os.open(out, flags), 1)
        os.dup2(os.open(err, flags), 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.update(job["environment"])
        sys.argv = ["kvgen", *job["line"]]
        from kvgen.__main__ import main

        main()
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    except BaseException:
        traceback.print_exc()
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.SIG_IGN)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _serve()
