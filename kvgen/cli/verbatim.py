"""A command whose texts come from the environment as they are."""

from __future__ import annotations

from functools import partial
from typing import Any

from typer.core import TyperCommand

_TEXTS = ("stop",)


class VerbatimCommand(TyperCommand):
    """``KVGEN_STOP`` is one text, spaces included; the parser would take it for a list of words."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for parameter in self.params:
            if parameter.name in _TEXTS:
                setattr(parameter, "value_from_envvar", partial(_whole, parameter))  # noqa: B010


def _whole(parameter: Any, context: Any) -> list[str] | None:
    value = parameter.resolve_envvar_value(context)
    return None if value is None else [value]
