"""``kvgen batch`` over several runs: the shard of each, and all results as one file again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from kvgen.cli import values
from kvgen.cli.streams import Output
from kvgen.errors import InputError, UsageError
from kvgen.models import ranks

if TYPE_CHECKING:
    from kvgen.measure.requests import Id, Request


def choose_shard(
    text: str | None, file: str, output: Path | None, device: str
) -> tuple[tuple[int, int] | None, Path | None, str]:
    """The shard to run, if it is not all; where its results go; and on which device.

    Under ``torchrun`` every rank takes a shard, writes a part beside the ``output`` and has its own
    device. Raises ``UsageError`` for what cannot be meant.
    """
    launch = ranks.launched()
    if launch is None:
        return None if text is None else values.shard(text), output, device
    if text is not None:
        raise UsageError("torchrun shards by rank already; leave out --shard, or start one process")
    if output is None or file == "-":
        raise UsageError("ranks cannot share stdin and stdout; name a file, and one with --output")
    if device in ("auto", "cuda"):
        import torch

        device = f"cuda:{launch.local_rank}" if torch.cuda.is_available() else device
    part = f"{launch.rank + 1}-of-{launch.size}"
    return (launch.rank + 1, launch.size), output.with_name(f"{output.name}.{part}"), device


def is_other_rank() -> bool:
    """Whether this is a rank of ``torchrun`` beside the one whose progress is shown."""
    launch = ranks.launched()
    return launch is not None and launch.rank > 0


def merge(requests: list[Request], parts: list[str], output: Path | None) -> int:
    """Write the results of all parts in the order of the requests.

    Raises ``InputError`` at the end where a request has no result, and ``UsageError`` for no parts,
    for an ``output`` that is one of them, and for a result of a request that was changed since.
    """
    from kvgen.measure.shards import merged

    if not parts:
        raise UsageError("--merge needs the files of results; name them after that of the prompts")
    if output is not None and output.exists() and output.resolve() in map(_resolved, parts):
        raise UsageError(f"{output} is one of the files to merge; write to another file")
    target = Output(output)
    digests = {request.id: request.digest for request in requests}
    lines, missing = merged(requests, [(name, _results(name, digests)) for name in parts])
    target.write(b"".join(lines).decode("utf-8"))
    target.close()
    if missing:
        count, first = len(missing), json.dumps(missing[0].id)
        raise InputError(
            f"{count:,} of {len(lines) + count:,} prompts have no result, first the one with the "
            f"id {first}; the others are merged"
        )
    return 0


def _results(name: str, digests: dict[Id, str]) -> dict[Id, bytes]:
    """The lines of a part by id; ``digests`` are the requests' own."""
    from kvgen.cli.results import result_of

    try:
        content = Path(name).read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror}") from error
    found: dict[Id, bytes] = {}
    for number, line in enumerate(content.splitlines(), 1):
        result = result_of(line, f"cannot merge {name}", number)
        key = result["id"]
        if key in found:
            raise UsageError(f"{name} has two results with the id {json.dumps(key)}")
        # Results of earlier versions do not say what they answer.
        if key in digests and result.get("input", digests[key]) != digests[key]:
            raise UsageError(
                f"{name} has a result with the id {json.dumps(key)}, and its line of prompts was "
                "changed since; merge with the prompts as they were, or run that one again"
            )
        found[key] = line + b"\n"
    return found


def _resolved(name: str) -> Path:
    return Path(name).resolve()
