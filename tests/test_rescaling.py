"""Rotary scaling that changes its base with the length: cached and uncached differ by rule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Cli
from tiny import save_tiny_tokenizer

BASE = 24


def save(folder: Path, **rotary: Any) -> Path:
    from families import tiny_model

    folder.mkdir()
    settings = {"rope_theta": 10_000.0} | rotary
    limit = {"max_position_embeddings": BASE if rotary["rope_type"] == "dynamic" else 4 * BASE}
    model = tiny_model("llama", vocab_size=257, rope_parameters=settings, **limit)
    model.save_pretrained(folder)
    save_tiny_tokenizer(folder)
    return folder


# In earlier releases dynamic scaling depends on what the model ran before.
@pytest.fixture(params=[pytest.param("dynamic", marks=pytest.mark.newest), "longrope"])
def scaled(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "dynamic":
        return save(tmp_path / "dynamic", rope_type="dynamic", factor=4.0)
    return save(
        tmp_path / "longrope",
        rope_type="longrope",
        factor=4.0,
        original_max_position_embeddings=BASE,
        short_factor=[1.0] * 4,
        long_factor=[3.0] * 4,
    )


def check(cli: Cli, folder: Path, prompt: str, new: int) -> tuple[int, dict[str, Any], str]:
    arguments = ("generate", prompt, "-m", folder, "-n", new, "--ignore-eos", "-f", "json")
    done = cli(*arguments, "--recompute", "all")
    return done.returncode, json.loads(done.stdout)["check"], done.stderr


def test_up_to_the_first_base_cached_and_uncached_are_the_same(cli: Cli, scaled: Path) -> None:
    code, found, _ = check(cli, scaled, "x" * 12, BASE - 12)
    assert (code, found["verdict"]) == (0, "exact")


def test_past_it_they_differ_and_kvgen_says_why_and_by_how_much(cli: Cli, scaled: Path) -> None:
    code, found, stderr = check(cli, scaled, "x" * 12, BASE)
    assert (code, found["verdict"]) == (0, "rescaled")
    within = [s for s in found["steps"] if 12 + s["index"] <= BASE]
    assert max(s["max_abs_logit_difference"] for s in within) <= found["tolerance"]
    assert max(s["max_abs_logit_difference"] for s in found["steps"]) > found["tolerance"]
    assert "by rotary rule" in stderr.splitlines()[-1]


def test_a_difference_before_the_change_is_still_broken() -> None:
    from kvgen.measure.records import CheckedStep
    from kvgen.measure.verdict import judge

    early, late = CheckedStep(3, False, 1.0, 0.1), CheckedStep(9, False, 1.0, 0.1)
    assert judge([late], 0.1, rescaled_from=5).verdict == "rescaled"
    assert judge([early, late], 0.1, rescaled_from=5).verdict == "broken"
    assert judge([late], 0.1).verdict == "broken"
