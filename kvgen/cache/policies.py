"""The storage policies that ``--cache NAME`` knows: the one place where a new one is entered.

``docs/policies.md`` shows how to add one. Imports neither torch nor transformers.
"""

from __future__ import annotations

import difflib
from dataclasses import fields
from typing import Any

from kvgen.cache.policy import Policy
from kvgen.cache.quantized import Int4, Int8
from kvgen.cache.stepwise import Exact, Step
from kvgen.cache.windowed import Window
from kvgen.errors import UsageError

DEFAULT = "step"

POLICIES: dict[str, type[Policy]] = {
    DEFAULT: Step,
    "exact": Exact,
    "int8": Int8,
    "int4": Int4,
    "window": Window,
}


def find_policy(text: str) -> Policy:
    """The policy that ``text`` names: ``NAME``, ``NAME:VALUE`` or ``NAME,OPTION:VALUE,...``.

    ``window:512,sink:4`` is the policy ``window`` with its options ``window`` and ``sink``. Raises
    ``UsageError`` for an unknown name, option or value, naming the known ones.
    """
    head, *rest = [part.strip() for part in text.split(",")]
    name = head.partition(":")[0]
    if name not in POLICIES:
        known = ", ".join(POLICIES)
        raise UsageError(f"unknown cache {name!r}; kvgen has: {known}")
    policy = POLICIES[name]
    return policy(**_options(name, policy, [head, *rest] if ":" in head else rest))


def _options(name: str, policy: type[Policy], parts: list[str]) -> dict[str, Any]:
    known = {field.name: field.type for field in fields(policy)}
    options: dict[str, Any] = {}
    for part in parts:
        option, colon, value = part.partition(":")
        if option not in known or not colon:
            near = difflib.get_close_matches(option, known, n=1, cutoff=0)
            hint = f"; the nearest option is {near[0]}:VALUE" if near else "; it has no options"
            raise UsageError(f"--cache {name} does not know {part!r}{hint}")
        options[option] = value if known[option] == "str" else _number(name, option, value)
    return options


def _number(name: str, option: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise UsageError(f"--cache {name}: {option} is a whole number, not {value!r}") from None
