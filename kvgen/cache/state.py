"""What a cache holds, taken apart into named tensors and whole numbers, and nothing besides.

Knows torch's tensors, and imports torch only for their type. Every part of a layer gives its state
and takes it back (``state`` and ``load``); a file, or anything else, may lie between the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class State:
    """Tensors and numbers by name. The name of a part's part is ``part.name``.

    Tensors may be views into buffers that go on changing. A part that is given them may keep them
    as its own, and write to them.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)

    def put(self, name: str, part: State) -> None:
        """Take in everything of ``part`` under its name."""
        self.tensors |= {f"{name}.{inner}": one for inner, one in part.tensors.items()}
        self.numbers |= {f"{name}.{inner}": one for inner, one in part.numbers.items()}

    def part(self, name: str) -> State:
        """What was put in under ``name``; empty if nothing was."""
        cut = len(name) + 1
        return State(
            {key[cut:]: one for key, one in self.tensors.items() if key.startswith(f"{name}.")},
            {key[cut:]: one for key, one in self.numbers.items() if key.startswith(f"{name}.")},
        )

    def parallel(self) -> tuple[Tensor, ...]:
        """The tensors ``0``, ``1``, ... that ``parallel_state`` named so."""
        return tuple(self.tensors[str(index)] for index in range(len(self.tensors)))


def parallel_state(tensors: Sequence[Tensor], **numbers: int) -> State:
    """Tensors that belong side by side, named by their place."""
    return State({str(index): one for index, one in enumerate(tensors)}, numbers)
