"""The processes of one run: ranks that ``torchrun`` starts together, and how they end together.

Imports torch once there are several. Everything here is about one run's own process group, which
torch keeps per process as well, so it is kept in one place: ``current()``.

All ranks run the same program on the same ids. What could differ between them is settled by rank
0: what a person typed, the time (see ``Ranks.tick``) and the tokens. How a run ended is settled by
whoever fails first, in the store that all ranks reach, also when the group itself is broken.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

from kvgen.errors import KvgenError, UsageError

T = TypeVar("T")

TIMEOUT_S = 600
_POLL_S = 0.25
_GRACE_S = 2.0  # for a rank to see by itself that the run has failed
_FIRST_S = 1.0  # for rank 0 to say first what went wrong everywhere
_LAST_S = 4.0  # for the others to leave before the store goes with its host
_LOST = re.compile(r"gloo|nccl|processgroup|connection (closed|reset)|tcpstore", re.IGNORECASE)


class RankLostError(KvgenError):
    """Another rank ended, or did not answer in time."""


@dataclass(frozen=True)
class Launch:
    """This process among those that were started together, as the environment says."""

    rank: int
    size: int
    local_rank: int
    local_size: int


class Ending(NamedTuple):
    """How a rank ended: its exit code, and its one line where the code is not 0."""

    rank: int
    code: int
    message: str


def launched() -> Launch | None:
    """What ``torchrun`` said of this process; ``None`` where it runs alone.

    Raises ``UsageError`` for an environment that only half says so.
    """
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if any(name not in os.environ for name in names):
        return None
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    except ValueError as error:
        raise UsageError(f"RANK and its kin must be numbers, as torchrun sets them: {error}") from (
            error
        )
    return Launch(rank, size, local_rank, local_size) if size > 1 else None


class Ranks:
    """This rank's end of the group."""

    def __init__(self, launch: Launch, timeout_s: float) -> None:
        """Meet the others. Raises ``RankLostError`` when not all come within the timeout."""
        import torch
        import torch.distributed as dist

        self.rank, self.size, self.local_size = launch.rank, launch.size, launch.local_size
        self.backend = "nccl" if torch.cuda.is_available() else "gloo"
        self.device = "cpu"
        if self.backend == "nccl":
            found = torch.cuda.device_count()
            if launch.local_size > found:
                raise UsageError(
                    f"{launch.local_size} ranks on this machine and {found} CUDA devices; start as "
                    "many ranks as there are, or hide the devices with CUDA_VISIBLE_DEVICES= "
                )
            torch.cuda.set_device(launch.local_rank)
            self.device = f"cuda:{launch.local_rank}"
        self.stop_asked = 0
        """Signals to stop that this rank got."""
        self.interrupted = False
        """Whether one of them was Ctrl-C."""
        self.lockstep = False
        """Whether signals wait for the next ``tick``, at which all ranks stop together."""
        self._timeout_s = timeout_s
        self._settled = threading.Event()
        limit = timedelta(seconds=timeout_s)
        # torchrun's agent hosts the store; without it rank 0 does.
        self._hosts = launch.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        try:
            self._store = self._join(self._hosts, limit)
            # A client of its own: another thread's long wait must not hold this one's questions up.
            self._watched = self._join(False, limit)
            dist.init_process_group(
                self.backend,
                store=dist.PrefixStore("group", self._store),
                rank=self.rank,
                world_size=self.size,
                timeout=limit,
            )
        except RuntimeError as error:
            raise RankLostError(f"not all {self.size} ranks came together: {error}") from error
        # Taken now: what counts the model's own collectives must not count these.
        self._reduce, self._broadcast = dist.all_reduce, dist.broadcast_object_list
        self._gather = dist.all_gather_object

    def _join(self, hosts: bool, limit: timedelta) -> Any:
        import torch.distributed as dist

        store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            self.size,
            hosts,
            limit,
            wait_for_workers=False,
        )
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return dist.PrefixStore(f"kvgen/{attempt}", store)

    @property
    def speaks(self) -> bool:
        """Whether this rank prints and writes files."""
        return self.rank == 0

    def share(self, make: Callable[[], T]) -> T:
        """What ``make`` gives on rank 0, on every rank. It must be plain data."""
        found = [json.dumps(make()) if self.speaks else None]
        self._broadcast(found)
        value: T = json.loads(str(found[0]))
        return value

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order."""
        found: list[Any] = [None] * self.size
        self._gather(found, value)
        return found

    def agree(self, token: int) -> int:
        """Rank 0's token."""
        return self._largest(token if self.speaks else -1)[0]

    def tick(self, seconds: float) -> float:
        """Rank 0's reading of its clock, so that whatever is decided by time is decided alike.

        Raises ``KeyboardInterrupt`` on all ranks if any was told to stop.
        """
        nanoseconds, stop = self._largest(round(seconds * 1e9) if self.speaks else -1)
        if stop:
            raise KeyboardInterrupt
        return nanoseconds / 1e9

    def _largest(self, value: int) -> tuple[int, int]:
        """The largest value of all ranks, and whether any of them was told to stop."""
        import torch
        import torch.distributed as dist

        both = torch.tensor([value, self.stop_asked], dtype=torch.int64, device=self.device)
        self._reduce(both, op=dist.ReduceOp.MAX)
        found, stop = both.tolist()
        return int(found), int(stop)

    def watch(self, leave: Callable[[Ending], None]) -> None:
        """Call ``leave`` from another thread when the run has failed and this rank is stuck."""
        threading.Thread(target=self._watch, args=(leave,), daemon=True).start()

    def _watch(self, leave: Callable[[Ending], None]) -> None:
        try:
            while not (ending := self._first(self._watched)):
                if self._settled.wait(_POLL_S):
                    return
        except RuntimeError as error:  # the store has gone with its host
            ending = Ending(self.rank, 1, f"rank 0 is gone: {error}")
        if not self._settled.wait(_GRACE_S):
            with contextlib.suppress(RuntimeError):
                self._watched.add("left", 1)
            leave(ending)

    def settle(self, code: int, message: str) -> Ending:
        """Say how this rank ended; how the run ended, by the rank that failed first.

        A rank that succeeded waits for the others, within the timeout.
        """
        self._settled.set()
        own = Ending(self.rank, code, message)
        try:
            if code:
                if not self.speaks:
                    self._poll("ended", self.size, _FIRST_S, or_failed=True)
                self._store.compare_set("ending", "", json.dumps(own))
            self._store.add("ended", 1)
            self._poll("ended", self.size, self._timeout_s, or_failed=True)
            ending = self._first(self._store) or own
            self._store.add("left", 1)
            if self._hosts:
                limit = _LAST_S if ending.code else self._timeout_s
                self._poll("left", self.size, limit)
        except RuntimeError:  # the store has gone with its host
            return own if code else Ending(0, 1, "rank 0 is gone")
        return ending

    def _poll(self, key: str, count: int, limit_s: float, or_failed: bool = False) -> None:
        deadline = time.monotonic() + limit_s
        while self._store.add(key, 0) < count and time.monotonic() < deadline:
            if or_failed and self._first(self._store):
                return
            time.sleep(_POLL_S / 10)

    def _first(self, store: Any) -> Ending | None:
        """The ending of the rank that failed first, if one has."""
        if not store.check(["ending"]):
            return None
        return Ending(*json.loads(store.get("ending")))

    @property
    def settled(self) -> bool:
        """Whether this rank has said how it ended."""
        return self._settled.is_set()

    def close(self) -> None:
        """Take the group down."""
        import torch.distributed as dist

        dist.destroy_process_group()

    def means_lost(self, error: BaseException) -> bool:
        """Whether an error says that another rank is gone, not that this one did wrong."""
        return isinstance(error, RuntimeError) and bool(_LOST.search(str(error)))


_current: Ranks | None = None


def current() -> Ranks | None:
    """This run's ranks; ``None`` where it is one process."""
    return _current


def join(timeout_s: float) -> Ranks:
    """Meet the ranks that were started with this one, and be one of them from now on.

    Raises ``UsageError`` where there are none.
    """
    global _current
    launch = launched()
    if launch is None:
        raise UsageError(
            "--parallel tensor needs several ranks; start them with "
            "torchrun --nproc-per-node 2 -m kvgen ..."
        )
    _current = Ranks(launch, timeout_s)
    return _current


def shared(make: Callable[[], T]) -> T:
    """What ``make`` gives, by rank 0 where there are several."""
    return make() if _current is None else _current.share(make)


def agreed(token: int) -> int:
    """The token, or rank 0's."""
    return token if _current is None else _current.agree(token)


def local(tensor: Any) -> Any:
    """This rank's part of a tensor that may be spread over several."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
