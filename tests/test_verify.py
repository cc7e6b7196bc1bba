"""``kvgen verify``: sound models pass, and each seeded fault fails under the name of its check."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import jsonschema
import pytest
import torch
from conftest import Cli
from families import WINDOW, tiny_model

from kvgen.cache.adapter import TransformersCache
from kvgen.cache.layers import Layer
from kvgen.cache.manager import KVCache
from kvgen.cache.recurrent import States
from kvgen.cache.slots import TokenSlots
from kvgen.engine.forward import Forward
from kvgen.measure.checks import Outcome
from kvgen.measure.verification import VerificationRun
from kvgen.measure.verify import Verifier
from kvgen.models import LoadedModel
from kvgen.report.document import schema

PROMPT = 3
LENGTH = WINDOW - 2  # so that only one check passes the window
TRAINING, TRIM, RESET = "one masked forward (training)", "trim and regenerate", "reset and repeat"
FORK, WINDOWS, BYTES = "fork is independent", "past the window", "bytes follow the formula"
CHUNKS = {"chunks of 1", "chunks of 3", "chunks of 7"}
SAVING = "save and load"
BATCHES = {"batch against alone", "left padding"}
ALL = {TRAINING, TRIM, RESET, FORK, SAVING, WINDOWS, BYTES, *CHUNKS, *BATCHES}


def newest(*values: Any) -> Any:
    """What needs recurrent layers as the newest transformers caches them."""
    return pytest.param(*values, marks=pytest.mark.newest)


def outcomes(model_type: str, length: int = LENGTH) -> dict[str, Outcome]:
    torch.set_num_threads(1)
    ids = random.Random(3).choices(range(3, 120), k=length)
    verifier = Verifier(tiny_model(model_type), ids, PROMPT, 1e-4, step=4)
    return {outcome.check: outcome for outcome in verifier.outcomes()}


def failed(model_type: str, length: int = LENGTH) -> set[str]:
    return {name for name, o in outcomes(model_type, length).items() if o.status == "fail"}


@pytest.mark.parametrize(
    "model_type", ["llama", "gemma3_text", newest("mamba2"), newest("qwen3_next")]
)
def test_a_sound_cache_passes_every_check_that_applies(model_type: str) -> None:
    found = outcomes(model_type, 20)
    assert not [o for o in found.values() if o.status == "fail"]
    assert set(found) == ALL
    assert found[SAVING].status == "pass"
    assert all(o.detail for o in found.values() if o.status == "not applicable")
    compared = [o for o in found.values() if o.status == "pass" and o.check != BYTES]
    assert all(0 <= (o.max_abs_logit_difference or 0) <= 1e-4 for o in compared)


Patch = pytest.MonkeyPatch


def position_off_by_one(patch: Patch) -> None:
    """Every step after the first forward is placed one too far."""
    original = Forward._inputs

    def inputs(self: Forward, tokens: int, cache: Any, position: int) -> dict[str, Any]:
        return original(self, tokens, cache, position + (position > 0))

    patch.setattr(Forward, "_inputs", inputs)


def window_off_by_one(patch: Patch) -> None:
    """A window keeps one pair too few."""

    def held(self: TokenSlots) -> int:
        return self.length if self.window is None else min(self.length, self.window - 2)

    patch.setattr(TokenSlots, "held", property(held))


def mask_from_the_wrong_layer(patch: Patch) -> None:
    """Every layer's mask is as wide as layer 0's, which has a window."""
    original = TransformersCache.get_mask_sizes
    patch.setattr(TransformersCache, "get_mask_sizes", lambda s, length, _: original(s, length, 0))


def trim_forgets_a_layer(patch: Patch) -> None:
    def trim(self: KVCache, tokens: int) -> None:
        for layer in self.layers[:-1]:
            layer.trim(tokens)
        self.position -= tokens

    patch.setattr(KVCache, "trim", trim)
    patch.setattr(Layer, "settle", lambda self, reached: None)


def reset_keeps_the_length(patch: Patch) -> None:
    def reset(self: TokenSlots) -> None:
        self._start = 0

    patch.setattr(TokenSlots, "reset", reset)
    patch.setattr(Layer, "settle", lambda self, reached: None)


def shared_fork(patch: Patch) -> None:
    """A fork writes into the buffers of the original."""

    def fork(self: TokenSlots) -> TokenSlots:
        twin = TokenSlots(self.window, self.step)
        twin.length, twin._start, twin._buffers = self.length, self._start, self._buffers
        return twin

    patch.setattr(TokenSlots, "fork", fork)


def forgetful_file(patch: Patch) -> None:
    """What is read back has lost its first pair: zeros stand there."""
    original = TokenSlots.load

    def load(self: TokenSlots, state: Any) -> None:
        original(self, state)
        for buffer in self._buffers:
            buffer[:, :, :1] = 0

    patch.setattr(TokenSlots, "load", load)


def dropped_recurrent_state(patch: Patch) -> None:
    patch.setattr(States, "set_recurrent", lambda self, state, index: torch.zeros_like(state))
    patch.setattr(States, "recurrent", lambda self, index: None)


def stale_capacity_tail(patch: Patch) -> None:
    """After older content was given up, one of its slots is read in place of the newest."""
    original = TokenSlots.update
    highest: WeakKeyDictionary[TokenSlots, int] = WeakKeyDictionary()

    def update(self: TokenSlots, *news: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pairs = original(self, *news)
        used = max(highest.get(self, 0), self.length)
        stale = used > self.length and self.capacity > self.length
        highest[self] = used
        if not stale:
            return pairs
        read = slice(self.length + 1 - pairs[0].shape[2], self.length + 1)
        return tuple(buffer[:, :, read] for buffer in self._buffers)

    patch.setattr(TokenSlots, "update", update)


EVERY_STEP = {TRAINING, *CHUNKS, TRIM, RESET, FORK, SAVING}
FAULTS: list[Any] = [
    # With a prompt of 6 tokens a piece of 7 is one forward, which no fault of later steps reaches.
    (position_off_by_one, "llama", EVERY_STEP - {"chunks of 7"}),
    (window_off_by_one, "gemma3_text", {WINDOWS}),
    (mask_from_the_wrong_layer, "gemma3_text", {WINDOWS}),
    (trim_forgets_a_layer, "llama", {TRIM}),
    (reset_keeps_the_length, "llama", {RESET}),
    (shared_fork, "llama", {FORK}),
    (forgetful_file, "llama", {SAVING}),
    newest(
        dropped_recurrent_state,
        "qwen3_next",
        {TRAINING, "chunks of 1", "chunks of 3", RESET, FORK, SAVING, BYTES},
    ),
    (stale_capacity_tail, "llama", {TRIM, RESET}),
]


@pytest.mark.parametrize(
    ("seed", "model_type", "names"), FAULTS, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_seeded_fault_fails_the_checks_it_belongs_to(
    seed: Callable[[Patch], None], model_type: str, names: set[str], monkeypatch: Patch
) -> None:
    assert not failed(model_type)
    seed(monkeypatch)
    # What breaks steps breaks them in a batch too, where it may be laid to the model.
    assert failed(model_type) - BATCHES == names


# The command


def test_the_table_goes_to_stdout_in_80_columns(cli: Cli, tiny_folder: Path) -> None:
    done = cli("verify", tiny_folder, "--quick", "--quiet")
    assert done.returncode == 0
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert max(map(len, lines[1:])) <= 80
    assert lines[0] == f"{tiny_folder} (llama, 2 layers): float32 on cpu"
    assert lines[-1] == "11 passed, 0 failed, 1 not applicable"
    assert sum(line.startswith(tuple(ALL)) for line in lines) == len(ALL)


def test_the_json_document_fits_its_schema(cli: Cli, tiny_folder: Path) -> None:
    done = cli("verify", "--model", tiny_folder, "-f", "json")
    document = json.loads(done.stdout)
    jsonschema.Draft202012Validator(schema("verify-1")).validate(document)
    assert document["tokens"] == 64
    assert {o["check"] for o in document["outcomes"]} == ALL


def test_a_failed_check_exits_5_and_names_it(
    cli: Cli, tiny_folder: Path, monkeypatch: Patch
) -> None:
    shared_fork(monkeypatch)
    done = cli("verify", tiny_folder, "--quick")
    assert done.returncode == 5
    assert done.stderr == f"kvgen: the cache is wrong for {tiny_folder}: fork is independent\n"
    row = next(line for line in done.stdout.splitlines() if line.startswith(FORK))
    assert row.split()[3] == "FAIL"
    assert row.endswith("position 7")  # the fork wrote into slot 6 after it was read
    assert done.stdout.endswith("10 passed, 1 failed, 1 not applicable\n")


def test_two_models_are_refused(cli: Cli, tiny_folder: Path) -> None:
    done = cli("verify", tiny_folder, "--model", "another")
    assert done.returncode == 2
    assert "name one" in done.stderr


def test_a_model_that_the_cache_cannot_serve_is_refused(
    cli: Cli, tiny_folder: Path, monkeypatch: Patch
) -> None:
    from kvgen.cache import quirks

    monkeypatch.setitem(quirks._REFUSED, "llama", "reads no cache")
    done = cli("verify", tiny_folder)
    assert done.returncode == 3
    assert "reads no cache" in done.stderr


@pytest.mark.real
def test_the_default_model_passes(smollm: LoadedModel) -> None:
    run = VerificationRun(smollm, quick=True)
    statuses = {outcome.check: outcome.status for outcome in run.outcomes()}
    assert {name: s for name, s in statuses.items() if s != "pass"} == {WINDOWS: "not applicable"}
