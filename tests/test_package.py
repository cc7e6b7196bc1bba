"""The package from outside: its public names, and the arrows between its rooms."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvgen

PACKAGE = Path(kvgen.__file__).parent
# A room and the rooms it may import; DESIGN: cli -> report, measure -> engine -> cache, models.
MAY_IMPORT = {
    "cache": {"cache"},
    "models": {"models"},
    "engine": {"engine", "cache", "models"},
    "measure": {"measure", "engine", "cache", "models"},
    "report": {"report", "measure"},
    "cli": {"cli", "report", "measure", "engine", "cache", "models"},
}
SAYS_NO_TORCH = re.compile(r"no torch\b|neither torch nor\s+transformers", re.IGNORECASE)


def imported(path: Path) -> set[str]:
    """Every module that a file imports anywhere, by its full name."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@pytest.mark.parametrize("name", kvgen.__all__)
def test_every_public_name_is_there_and_says_what_it_is(name: str) -> None:
    assert getattr(kvgen, name).__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        kvgen.nonsense  # noqa: B018


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_no_room_imports_upward(room: str) -> None:
    for path in (PACKAGE / room).rglob("*.py"):
        for name in imported(path):
            parts = name.split(".")
            if parts[0] == "kvgen" and len(parts) > 1 and (PACKAGE / parts[1]).is_dir():
                assert parts[1] in MAY_IMPORT[room], f"{path.name} imports {name}"


def test_only_the_adapter_knows_the_librarys_cache() -> None:
    knowing = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if any(name.startswith("transformers.cache_utils") for name in imported(path))
    }
    assert "cache/adapter.py" in knowing
    assert knowing <= {"cache/adapter.py", "cache/rivals.py"}


def test_a_file_that_says_it_imports_no_torch_imports_none() -> None:
    saying = [
        "kvgen." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for path in sorted(PACKAGE.rglob("*.py"))
        if SAYS_NO_TORCH.search(ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "")
    ]
    assert {"kvgen.cache.spec", "kvgen.cache.shapes", "kvgen.cache.states"} <= set(saying)
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    assert not {'torch', 'transformers'} & set(sys.modules), name\n"
    )
    subprocess.run([sys.executable, "-c", code, *saying], check=True, timeout=60)


_PICKLING = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
_UNPICKLING = {"torch.load", "torch.save", "np.load", "numpy.load", "pd.read_pickle"}


def pickling(source: str) -> list[str]:
    """Everything in a file's source that reads or writes pickles."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[0] in _PICKLING]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [node.module] if (node.module or "").split(".")[0] in _PICKLING else []
            found += [name for name in names if name in _UNPICKLING]
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in _UNPICKLING:
            found.append(ast.unparse(node))
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            found.append("allow_pickle")
    return found


def test_no_pickle_is_read_or_written_anywhere() -> None:
    for path in PACKAGE.rglob("*.py"):
        assert not pickling(path.read_text("utf-8")), path


@pytest.mark.parametrize(
    "line",
    [
        *("import pickle", "from dill import loads", "import torch; torch.load('x')"),
        *("from torch import load as read", "import numpy as np; np.load('x', allow_pickle=True)"),
    ],
)
def test_a_pickle_would_be_found(line: str) -> None:
    assert pickling(line)
