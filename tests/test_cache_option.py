"""``--cache``: every policy through a whole generation, and what it says of itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Cli

from kvgen.cache.adapter import TransformersCache, specs_for
from kvgen.cache.policies import find_policy
from kvgen.engine.forward import Forward
from kvgen.measure.records import CheckedStep
from kvgen.measure.run import GenerationOptions, GenerationRun
from kvgen.measure.verdict import judge
from kvgen.models import LoadedModel

POLICIES = ("step", "step:16", "exact", "int8", "int4", "int8,keys:channel", "window:8,sink:2")


def generated(cli: Cli, folder: Path, policy: str, *more: str) -> dict[str, Any]:
    done = cli(
        *("generate", "a" * 40, "--model", folder, "--ignore-eos", "-n", "24", "--no-warmup"),
        *("--cache", policy, "--format", "json", "--quiet", *more),
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_generates_holds_what_its_formula_says_and_is_named(
    cli: Cli, tiny_folder: Path, policy: str
) -> None:
    # Random weights magnify rounding: the tolerance of int8 is for real models.
    roomy = [f"{policy},recent:64"] if policy == "int8" else [policy]
    found = generated(cli, tiny_folder, roomy[0])
    last = found["steps"][-1]
    assert found["cache"] == roomy[0]
    assert last["kv_bytes_used"] == found["kv_bytes_formula"]
    assert last["kv_bytes_allocated"] >= last["kv_bytes_used"]
    exact = find_policy(policy).exact
    assert found["check"]["verdict"] in (("exact",) if exact else ("exact", "lossy"))
    assert any("changes the model's" in note for note in found["notes"]) != exact


def test_exact_holds_not_one_byte_too_many(cli: Cli, tiny_folder: Path) -> None:
    last = generated(cli, tiny_folder, "exact")["steps"][-1]
    assert last["kv_bytes_allocated"] == last["kv_bytes_used"]


def test_a_lossy_verdict_stands_in_the_table_with_its_size(cli: Cli, tiny_folder: Path) -> None:
    done = cli(
        *("generate", "a" * 40, "--model", tiny_folder, "--ignore-eos", "-n", "24"),
        *("--cache", "window:4"),
    )
    assert done.returncode == 0
    flat = " ".join(done.stderr.split())
    assert "lossy as --cache window:4 is, max |Δlogit|" in flat
    assert "changes the model's output" in flat


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--cache", "int9"), "unknown cache 'int9'"),
        (("--cache", "int8", "--no-cache"), "leave out --no-cache"),
        (("--cache", "int8", "--cache-step", "8"), "--cache-step is for --cache step"),
    ],
)
def test_contradictions_are_refused(cli: Cli, options: tuple[str, ...], message: str) -> None:
    done = cli("generate", "x", *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_cache_step_is_the_step(cli: Cli, tiny_folder: Path) -> None:
    done = cli(
        *("generate", "a" * 40, "--model", tiny_folder, "--ignore-eos", "-n", "3", "-q"),
        *("--cache-step", "8", "--format", "json"),
    )
    assert json.loads(done.stdout)["cache"] == "step:8"


@pytest.mark.parametrize(
    ("difference", "lossy", "verdict"),
    [
        (0.005, None, "exact"),
        (0.005, 1.0, "exact"),
        (0.5, None, "broken"),
        (0.5, 1.0, "lossy"),
        (2.0, 1.0, "broken"),
        (2.0, float("inf"), "lossy"),
        (float("nan"), float("inf"), "broken"),
        (float("inf"), float("inf"), "broken"),
    ],
)
def test_what_a_lossy_policy_is_forgiven(
    difference: float, lossy: float | None, verdict: str
) -> None:
    steps = [CheckedStep(0, difference < 1, difference, 1.0)]
    assert judge(steps, 0.01, lossy=lossy).verdict == verdict


@pytest.mark.parametrize("chunk", [1, 3, 7])
@pytest.mark.parametrize(("keep", "sink"), [(4, 0), (4, 2), (9, 5), (100, 3)])
def test_a_cut_window_is_the_model_under_that_mask(
    tiny: LoadedModel, chunk: int, keep: int, sink: int
) -> None:
    """Against one uncached forward whose mask says by hand what each query may see."""
    ids = [(7 * i) % 200 + 3 for i in range(30)]
    cache = find_policy(f"window:{keep},sink:{sink}").make(specs_for(tiny.model))
    forward, adapter = Forward(tiny.model), TransformersCache(cache)
    rows, mask = [], torch.full((30, 30), float("-inf"))
    for begin in range(0, 30, chunk):
        rows.append(forward.cached_everywhere(ids[begin : begin + chunk], adapter))
        for query in range(begin, min(begin + chunk, 30)):
            # The first tokens, the last ones before this chunk, and the chunk up to the query.
            oldest = max(sink, begin - keep)
            mask[query, : min(sink, query + 1)] = 0
            mask[query, oldest : query + 1] = 0
    with torch.inference_mode():
        expected = tiny.model(
            input_ids=torch.tensor([ids]), attention_mask=mask[None, None], use_cache=False
        ).logits[0]
    found = torch.cat(rows)
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_a_window_does_not_suit_a_model_that_counts_slots(cli: Cli, tmp_path: Path) -> None:
    from families import tiny_model

    from kvgen.cache.quirks import slots_are_positions

    assert slots_are_positions(tiny_model("bloom"))
    assert slots_are_positions(tiny_model("mpt"))
    assert not slots_are_positions(tiny_model("llama"))
    assert not slots_are_positions(tiny_model("gpt2"))


@pytest.mark.real
def test_int8_on_a_thousand_tokens_is_small_and_within_its_tolerance(smollm: LoadedModel) -> None:
    text = " ".join(f"Line {i} says that {i} times {i} is {i * i}." for i in range(120))
    ids = smollm.tokenizer(text)["input_ids"][:1000]
    prompt = smollm.tokenizer.decode(ids)
    options = GenerationOptions(
        prompt, max_new_tokens=4, cache="int8,group:64", recompute="all", warmup=False
    )
    run = GenerationRun(smollm, options)
    for _ in run.pieces():
        pass
    record = run.finish()
    assert record.check is not None
    assert record.check.lossy_tolerance is not None
    assert record.check.verdict in ("exact", "tolerance", "lossy")
    assert record.check.max_abs_logit_difference <= record.check.lossy_tolerance
    held = record.prompt_tokens + 3
    assert 990 < held < 1010
    # SmolLM2's scales take 2 bytes whatever the dtype, so float16's bytes follow from the formula.
    half = find_policy("int8,group:64")
    specs = specs_for(smollm.model)
    as_half = sum(half.pair_bytes(spec, held, 2) for spec in specs)
    assert as_half <= 0.56 * sum(spec.pair_bytes(held, 2) for spec in specs)
    assert record.steps[-1].kv_bytes_used == record.kv_bytes_formula
