"""The worked example in ``docs/policies.md`` is run as it stands there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Cli
from test_layers import tensors
from test_policies import real_bytes, spec_for

from kvgen.cache.policies import POLICIES, find_policy

PAGE = Path(__file__).parent.parent / "docs" / "policies.md"


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example's policy, entered by the example's line."""
    module, line = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    namespace: dict[str, Any] = {"__name__": "half"}
    exec(module, namespace)
    entered: dict[str, Any] = {}
    exec(line, namespace | {"POLICIES": entered})
    monkeypatch.setitem(POLICIES, "half", entered["half"])
    return find_policy("half")


@pytest.mark.parametrize("window", [None, 9])
def test_the_example_stores_what_its_formula_says(half: Any, window: int | None) -> None:
    spec = spec_for(window)
    slots = half.slots(spec)
    for length in range(1, 40):
        keys, _values = slots.update(*tensors([float(length)]))
        assert keys.dtype == torch.float32
        assert slots.bytes_used == half.pair_bytes(spec, length, 4)
        assert sum(buffer.nbytes for buffer in slots.buffers()) == real_bytes(slots)
    twin = slots.fork()
    assert type(twin) is type(slots)
    slots.reset()
    assert twin.bytes_used == half.pair_bytes(spec, 39, 4)


def test_the_example_generates(half: Any, cli: Cli, tiny_folder: Path) -> None:
    done = cli(
        *("generate", "a" * 20, "--model", tiny_folder, "-n", "8", "--ignore-eos", "-q"),
        *("--cache", "half", "--format", "json"),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["cache"] == "half"
    assert found["check"]["verdict"] in ("exact", "tolerance", "lossy")
    assert found["steps"][-1]["kv_bytes_used"] == found["kv_bytes_formula"]
    assert "half rounds stored keys" in " ".join(found["notes"])


def test_the_page_names_every_policy_and_no_other() -> None:
    rows = re.findall(r"^\| `(\w+)", PAGE.read_text("utf-8"), re.MULTILINE)
    assert rows == list(POLICIES)
