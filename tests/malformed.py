"""What malformed inputs are made of: a place to lay them out, and a whole model to damage."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
DROP = "(leave this field out)"


class Place(NamedTuple):
    """A folder of the case's own, and whole files to damage copies of."""

    root: Path
    tiny: Path
    """A model's folder."""
    gguf: bytes
    result: Mapping[str, Any]
    """What ``kvgen compare`` saved."""
    kept: bytes
    """What ``kvgen cache save`` wrote."""

    def file(self, name: str, content: str | bytes) -> Path:
        """A file of that content."""
        path = self.root / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def model(self) -> Path:
        """A copy of the model's folder."""
        return Path(shutil.copytree(self.tiny, self.root / "model"))


class Case(NamedTuple):
    """One malformed input.

    ``line`` is its command line; in it ``$M`` is the whole model and ``$F`` what ``lay`` returns.
    """

    line: str
    code: int
    says: str
    lay: Callable[[Place], Path] | None = None
    name: str = ""


def changed(file: Path, **changes: Any) -> None:
    """Change or drop fields of a JSON file."""
    content = json.loads(file.read_text("utf-8")) | changes
    file.write_text(json.dumps({k: v for k, v in content.items() if v != DROP}), "utf-8")


def model_case(
    name: str, damage: Callable[[Path], object], says: str, line: str = "generate x -n 2 -q -m $F"
) -> Case:
    """A copy of the model's folder after ``damage``."""

    def lay(place: Place) -> Path:
        folder = place.model()
        damage(folder)
        return folder

    return Case(line, 3, says, lay, name)


def file_case(name: str, file: str, content: str | bytes, line: str, code: int, says: str) -> Case:
    """A file of that content."""
    return Case(line, code, says, lambda place: place.file(file, content), name)
