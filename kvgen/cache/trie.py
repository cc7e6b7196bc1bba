"""A trie over token ids whose edges are runs of ids. Knows nothing but ids.

Ids are compared one by one, never only as a hash.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Ids = tuple[int, ...]
Value = TypeVar("Value")


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens that both begin with."""
    shorter = min(len(first), len(second))
    if first[:shorter] == second[:shorter]:  # no loop where all agree, which is the common case
        return shorter
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return index
    return shorter


@dataclass
class Node(Generic[Value]):
    """Ids that follow its parent's, and what is kept where they end."""

    edge: Ids = ()
    children: dict[int, Node[Value]] = field(default_factory=dict)
    value: Value | None = None

    def values(self) -> Iterator[Value]:
        """All that is kept here and below."""
        if self.value is not None:
            yield self.value
        for child in self.children.values():
            yield from child.values()


class Trie(Generic[Value]):
    """Values by ids."""

    def __init__(self) -> None:
        self._root: Node[Value] = Node()

    def path(self, ids: Ids) -> list[tuple[Node[Value], int]]:
        """Nodes from the root along ``ids``, each with how many of the ids it agrees with.

        The last one may agree with only a part of its edge.
        """
        node, depth = self._root, 0
        path = [(node, depth)]
        while child := node.children.get(ids[depth]) if depth < len(ids) else None:
            shared = common_prefix(child.edge, ids[depth : depth + len(child.edge)])
            node, depth = child, depth + shared
            path.append((node, depth))
            if shared < len(child.edge):
                break
        return path

    def node(self, ids: Ids) -> Node[Value]:
        """The node at which ``ids`` end, made if it is not there."""
        path = self.path(ids)
        node, depth = path[-1]
        if len(path) > 1:
            shared = depth - path[-2][1]
            if shared < len(node.edge):
                lower = Node(node.edge[shared:], node.children, node.value)
                node.edge, node.children, node.value = node.edge[:shared], {}, None
                node.children[lower.edge[0]] = lower
        if depth < len(ids):
            node.children[ids[depth]] = node = Node(ids[depth:])
        return node

    def drop(self, ids: Ids) -> None:
        """Forget the value at ``ids``, which is there, and the nodes that lead nowhere any more."""
        path = self.path(ids)
        path[-1][0].value = None
        for (parent, _), (node, _) in zip(path[-2::-1], path[:0:-1], strict=True):
            if node.value is None and not node.children:
                del parent.children[node.edge[0]]
