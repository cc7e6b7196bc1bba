"""A command that remembers in which order its options came."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand

_KEY = "kvgen.option_order"


class OrderedCommand(TyperCommand):
    """Options of different names that form one list, such as contestants, keep their order."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as usual, and keep the names of the parameters in the order they were given."""
        try:
            _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        except Exception:
            order = []  # the parsing proper, next, says what is wrong
        ctx.meta[_KEY] = [parameter.name for parameter in order]
        return super().parse_args(ctx, args)


def in_order(context: typer.Context, lists: dict[str, list[str]]) -> list[tuple[str, str]]:
    """The values in ``lists`` (by parameter name) as pairs, in the order of the command line.

    Those that came from the environment or a file follow, in the order of ``lists``.
    """
    left = {name: list(values) for name, values in lists.items()}
    found = [(name, left[name].pop(0)) for name in context.meta.get(_KEY, []) if left.get(name)]
    return found + [(name, value) for name, values in left.items() for value in values]
