"""The memory guard: what is refused, with which numbers, and what happens when memory ends."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import FOLDER, raw
from conftest import Cli

from kvgen.cache.policies import find_policy
from kvgen.errors import InputError
from kvgen.measure import guard
from kvgen.measure.guard import Demand, check_before_loading, free_bytes
from kvgen.models.types import LoadOptions

GIB = 2**30
QWEN = LoadOptions(model=str(FOLDER / "qwen3-8b.json"), device="cpu")


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Say how much memory there is."""

    def there_are(count: int | None) -> None:
        monkeypatch.setattr(guard, "free_bytes", lambda device: count)

    return there_are


def test_what_fits_is_not_refused(free: Any) -> None:
    free(24 * GIB)
    check_before_loading(QWEN, Demand(4096, find_policy("step"), 1))
    free(None)
    check_before_loading(QWEN, Demand(10**9, find_policy("step"), 1))


def test_a_refusal_has_the_numbers_and_the_context_that_fits(free: Any) -> None:
    free(17 * GIB)
    with pytest.raises(InputError) as refusal:
        check_before_loading(QWEN, Demand(32768, find_policy("step"), 1))
    message = str(refusal.value)
    # 16,380,854,272 bytes of weights, 32,768 x 147,456 of cache
    assert "weights of 15.3 GiB" in message
    assert "a KV cache of 4.5 GiB" in message
    assert "17.0 GiB are free" in message
    most = int(message.split("a context of ")[1].split(" ")[0].replace(",", ""))
    check_before_loading(QWEN, Demand(most, find_policy("step"), 1))
    with pytest.raises(InputError):
        check_before_loading(QWEN, Demand(most + 1, find_policy("step"), 1))


def test_a_smaller_storage_fits_where_a_larger_does_not(free: Any) -> None:
    free(19 * GIB)
    with pytest.raises(InputError):
        check_before_loading(QWEN, Demand(32768, find_policy("step"), 1))
    check_before_loading(QWEN, Demand(32768, find_policy("int8"), 1))
    check_before_loading(QWEN, Demand(32768, None, 1))


def test_weights_that_do_not_fit_leave_no_context(free: Any) -> None:
    free(8 * GIB)
    with pytest.raises(InputError, match="no context would fit"):
        check_before_loading(QWEN, Demand(10, find_policy("step"), 1))
    # In float32 they take twice what the checkpoint does.
    free(24 * GIB)
    with pytest.raises(InputError, match=r"weights of 30\.5 GiB"):
        check_before_loading(replace(QWEN, dtype="float32"), Demand(1, None, 1))


def test_what_cannot_be_predicted_is_not_refused(free: Any, tmp_path: Path) -> None:
    free(1)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(raw("qwen3-8b") | {"model_type": "gemma4_text"}), "utf-8")
    check_before_loading(replace(QWEN, model=str(path)), Demand(10**9, None, 1))


def test_generate_refuses_before_loading_and_force_overrides(
    cli: Cli, tiny_folder: Path, free: Any
) -> None:
    free(1000)
    line = ("generate", "abc", "--model", tiny_folder, "-n", "2", "--ignore-eos", "-q")
    done = cli(*line)
    assert (done.returncode, done.stdout) == (4, "")
    assert "--force" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert cli(*line, "--force").returncode == 0


def test_generate_refuses_before_growing_when_the_prompt_is_what_does_not_fit(
    cli: Cli, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvgen.measure.guard.check_before_loading", lambda *_: None)
    monkeypatch.setattr(guard, "free_bytes", lambda device: 20_000)
    done = cli("generate", "a" * 100, "--model", tiny_folder, "-n", "20", "-q")
    assert (done.returncode, done.stdout) == (4, "")
    assert "119 tokens need" in done.stderr


class _Full(torch.nn.Module):
    """Runs out of memory at the n-th forward of one token."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.left = after

    def __call__(self, *_: Any) -> None:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate")


@pytest.mark.parametrize("form", ["text", "json"])
def test_running_out_of_memory_gives_the_text_so_far(
    cli: Cli, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    from kvgen.engine.decoder import Decoder

    line = ("generate", "abc", "--model", tiny_folder, "--ignore-eos", "--no-warmup", "-q")
    whole = json.loads(cli(*line, "-n", "5", "-f", "json").stdout)["text"]
    full, step = _Full(5), Decoder.step

    def failing(self: Decoder) -> Any:
        full()
        return step(self)

    monkeypatch.setattr(Decoder, "step", failing)
    done = cli(*line, "-n", "20", "-f", form)
    assert done.returncode == 4
    assert "out of memory after 5 new tokens, at 8 in all" in done.stderr
    if form == "json":
        document = json.loads(done.stdout)
        assert (document["text"], document["finish_reason"]) == (whole, "memory")
        assert len(document["steps"]) == 5
    else:
        assert done.stdout == whole


def test_other_errors_are_not_taken_for_a_lack_of_memory(
    cli: Cli, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvgen.engine.decoder import Decoder

    def failing(self: Decoder) -> Any:
        raise RuntimeError("something else")

    monkeypatch.setattr(Decoder, "step", failing)
    done = cli("generate", "abc", "--model", tiny_folder, "--no-warmup", "-q")
    assert done.returncode == 1
    assert "something else" in done.stderr


def test_free_memory_is_a_plausible_number() -> None:
    found = free_bytes("cpu")
    assert found is not None
    assert 2**20 < found < 2**50
    assert free_bytes("mps") is None


def test_a_container_leaves_what_its_limit_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "_CGROUP", tmp_path)
    before = free_bytes("cpu")
    (tmp_path / "memory.max").write_text("5000000\n")
    (tmp_path / "memory.current").write_text("2000000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 500000\n")
    assert free_bytes("cpu") == 3_500_000
    (tmp_path / "memory.max").write_text("max\n")
    after = free_bytes("cpu")
    assert before is not None
    assert after is not None
    assert after > 3_500_000
