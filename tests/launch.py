"""Start several ranks of one ``kvgen`` run, as ``torchrun`` would, and keep each one's own end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from conftest import Done


class Group:
    """Processes that know of each other. Used as a context, none outlives it."""

    def __init__(self, size: int, *arguments: str | Path, stdin: str = "") -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._stdin = stdin
        self.ranks = [self._start(rank, size, port, arguments) for rank in range(size)]

    def _start(
        self, rank: int, size: int, port: int, arguments: tuple[str | Path, ...]
    ) -> subprocess.Popen[str]:
        names = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        return subprocess.Popen(
            [sys.executable, "-m", "kvgen", *map(str, arguments)],
            env=os.environ | {name: str(value) for name, value in names.items()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def first_text(self) -> str:
        """What rank 0 prints first."""
        assert self.ranks[0].stdout is not None
        return self.ranks[0].stdout.read(1)

    def wait(self, limit_s: float = 120) -> list[Done]:
        """Each rank's end; raises ``TimeoutExpired`` when they do not end within the limit."""
        deadline = time.monotonic() + limit_s
        done = []
        for rank in self.ranks:
            stdin = self._stdin if rank is self.ranks[0] else ""
            out, err = rank.communicate(stdin, timeout=max(0.1, deadline - time.monotonic()))
            done.append(Done(rank.returncode, out, err))
        return done

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.communicate()
