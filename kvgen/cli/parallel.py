"""Commands that run as several ranks: only rank 0 speaks, and all end with the same exit code.

Imports no torch; joining the ranks does.
"""

from __future__ import annotations

import os
import re
import sys
from enum import Enum

from kvgen.cli.interrupts import INTERRUPTED, stop_together
from kvgen.errors import UsageError
from kvgen.models import ranks
from kvgen.models.types import Spread
from kvgen.report.units import visible

_PLACE = re.compile(r"\[\S*\.(cc|cpp):\d+\]\s*")  # in the library's source


class Parallel(str, Enum):
    """How a model is spread over several ranks."""

    none = "none"
    tensor = "tensor"


class DeviceMap(str, Enum):
    """How a model's layers are spread over the devices of one machine."""

    none = "none"
    auto = "auto"


def quiet_other_ranks(command: str) -> None:
    """Have nothing of this process seen unless it is rank 0; what libraries print included.

    Ranks of a batch each have prompts of their own, and errors of their own to say.
    """
    if command == "batch":
        return
    try:
        launch = ranks.launched()
    except UsageError:
        return  # said by every rank, since nobody knows which this is
    if launch is not None and launch.rank > 0:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for number in (1, 2):
            os.dup2(nowhere, number)


def begin(parallel: Parallel, device_map: DeviceMap, timeout_s: float) -> Spread:
    """Meet the other ranks if the command line wants them; how the model is to be divided.

    Raises ``UsageError`` where the command line and ``torchrun`` do not say the same.
    """
    if parallel is Parallel.tensor and device_map is DeviceMap.auto:
        raise UsageError("--parallel tensor and --device-map auto exclude each other; choose one")
    if parallel is Parallel.tensor:
        joined = ranks.join(timeout_s)
        stop_together(joined)
        joined.watch(_leave)
    else:
        one_process("add --parallel tensor, or ")
    return "tensor" if parallel is Parallel.tensor else device_map.value


def one_process(instead: str = "") -> None:
    """Raise ``UsageError`` where ``torchrun`` started several; ``instead`` is a way out."""
    if launch := ranks.launched():
        raise UsageError(
            f"torchrun started {launch.size} ranks, which would all do the same; {instead}start "
            "one process"
        )


def speaks() -> bool:
    """Whether this process prints and writes files: always, unless it is another than rank 0."""
    joined = ranks.current()
    return joined is None or joined.speaks


def settled(code: int, message: str, error: BaseException | None) -> tuple[int, str]:
    """The exit code and the line of the whole run, given this rank's own.

    ``error`` is what ended this rank, if one did.
    """
    joined = ranks.current()
    if joined is None:
        return code, message
    if error is not None and joined.means_lost(error):
        why = _PLACE.sub("", str(error))
        code, message = 1, f"another rank ended or did not answer, and so ends the run: {why}"
        if joined.interrupted:
            code, message = INTERRUPTED, "interrupted"
    ending = joined.settle(code, message)
    if ending.code == 0:
        joined.close()
        return 0, ""
    if ending.rank not in (0, joined.rank) and ending.message != message:
        return ending.code, f"rank {ending.rank}: {ending.message}"
    return ending.code, ending.message


def leave(code: int) -> None:
    """End the process at once where its group broke, as taking that down could wait for ever."""
    if ranks.current() is not None and code:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _leave(ending: ranks.Ending) -> None:
    """End a process whose main thread waits for ranks that are gone."""
    if speaks():
        who = f"rank {ending.rank}: " if ending.rank else ""
        print(f"kvgen: {visible(who + ending.message)}", file=sys.stderr, flush=True)
    os._exit(ending.code)
