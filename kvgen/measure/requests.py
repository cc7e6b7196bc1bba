"""The prompts of a batch, read from JSON Lines. Knows no tokenizer and no model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from kvgen.engine.special import Message
from kvgen.errors import UsageError, nearest

Id = str | int


@dataclass(frozen=True)
class Request:
    """One prompt: a text, or a conversation of ``{"role": ..., "content": ...}`` messages.

    What is ``None`` is as the whole batch has it. ``line`` is where it was read, counted from 1.
    """

    id: Id
    prompt: str | None = None
    messages: tuple[Message, ...] | None = None
    chat: bool | None = None
    system: str | None = None
    max_new_tokens: int | None = None
    stop: tuple[str, ...] | None = None
    seed: int | None = None
    line: int | None = None

    @property
    def digest(self) -> str:
        """Of all that was asked for, wherever it was read."""
        fields = asdict(self) | {"line": None}
        return hashlib.sha256(json.dumps(fields).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Rejected:
    """A request that cannot be served, and why."""

    line: int | None
    id: Id | None
    reason: str


_FIELDS = ("id", "prompt", "messages", "chat", "system", "max_new_tokens", "stop", "seed")


def read_requests(lines: Iterable[bytes]) -> tuple[list[Request], list[Rejected]]:
    """The requests in JSON Lines, and the lines that hold none. Blank lines count, and are skipped.

    A request without an id has its line number as one. Raises ``UsageError`` where two have the
    same id, since nothing could tell their results apart.
    """
    requests: list[Request] = []
    rejected: list[Rejected] = []
    for number, line in enumerate(lines, 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            if text.strip():
                requests.append(_request(json.loads(text), number))
        except UnicodeDecodeError:
            rejected.append(Rejected(number, None, "is not UTF-8 text"))
        except json.JSONDecodeError as error:
            rejected.append(Rejected(number, None, f"is not JSON: {error.msg} at {error.colno}"))
        except (ValueError, RecursionError) as error:
            rejected.append(Rejected(number, None, str(error)))
    check_ids(requests)
    return requests, rejected


def check_ids(requests: Iterable[Request]) -> None:
    """Raise ``UsageError`` where two requests have the same id."""
    first: dict[Id, Request] = {}
    for request in requests:
        other = first.get(request.id)
        first[request.id] = request
        if other is not None:
            where = "" if request.line is None else f" (lines {other.line} and {request.line})"
            raise UsageError(
                f"two prompts have the id {json.dumps(request.id)}{where}; every id may occur once"
            )


def _request(fields: Any, line: int) -> Request:
    """Raises ``ValueError`` for what is no request."""
    if not isinstance(fields, dict):
        raise ValueError('is no JSON object, such as {"id": "a", "prompt": "Time flies"}')
    for name in fields:
        if name not in _FIELDS:
            raise ValueError(f"has an unknown field {name!r}{nearest(name, _FIELDS)}")
    given = {name: value for name, value in fields.items() if value is not None}
    for name, kind, wanted in (
        ("id", (str, int), "text or a whole number"),
        ("prompt", str, "text"),
        ("system", str, "text"),
        ("max_new_tokens", int, "a whole number"),
        ("seed", int, "a whole number"),
    ):
        _expect(name, given.get(name), kind, wanted)
    if "chat" in given and not isinstance(given["chat"], bool):
        raise ValueError("has a chat that is not true or false")
    if given.get("max_new_tokens", 1) < 1:
        raise ValueError("asks for less than 1 new token")
    if not 0 <= given.get("seed", 0) < 2**63:
        raise ValueError("has a seed that is not from 0 to 2^63 - 1")
    if ("prompt" in given) == ("messages" in given):
        raise ValueError("needs a prompt or messages, and not both")
    if "messages" in given and given.keys() & {"system", "chat"}:
        raise ValueError("has messages, which are a chat with its system message already")
    if "system" in given and given.get("chat") is False:
        raise ValueError("has a system message, and a chat that is false")
    given["messages"] = _messages(given.get("messages"))
    given["stop"] = _stop(given.get("stop"))
    given.setdefault("id", line)
    return Request(**given, line=line)


def _expect(name: str, value: Any, kind: Any, wanted: str) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, kind)):
        raise ValueError(f"has {name} = {json.dumps(value)}, which is not {wanted}")


def _messages(value: Any) -> tuple[Message, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not value or not all(map(_is_message, value)):
        raise ValueError(
            'has messages that are not a list of {"role": "user", "content": "..."} objects'
        )
    return tuple(value)


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"role", "content"}
        and all(isinstance(part, str) for part in value.values())
    )


def _stop(value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("has a stop that is neither text nor a list of texts")
    if "" in stops:
        raise ValueError("has an empty stop, which would end everything at once")
    return tuple(stops)
