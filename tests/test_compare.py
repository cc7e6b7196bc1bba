"""Comparisons over real (tiny) models: agreement, damage, memory, tokens, gates."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded import loaded_tiny
from torch import Tensor

from kvgen.cache.manager import KVCache
from kvgen.cache.policies import POLICIES, find_policy
from kvgen.cache.rivals import RivalCache
from kvgen.cache.stepwise import Step
from kvgen.engine.forward import Forward
from kvgen.errors import InputError, UsageError
from kvgen.measure import setup
from kvgen.measure.compare import Track
from kvgen.measure.comparison_records import Comparison, Result
from kvgen.measure.gates import GateOptions, check_baseline, evaluate
from kvgen.measure.setup import Choice, CompareOptions, check_choices, prepare
from kvgen.measure.stats import Ratio, Summary
from kvgen.measure.tokens import builtin_ids, read_tokens, tokens_document, tracks_for
from kvgen.models import LoadedModel, LoadOptions, load_model

Change = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
NO_CACHE = Choice("no_cache")


def never(dtype: str) -> LoadedModel:
    raise AssertionError(f"nothing asked for {dtype}")


def run(loaded: LoadedModel, *choices: Choice, **settings: Any) -> Comparison:
    options = CompareOptions(
        **{"choices": choices, "prompt_tokens": 12, "new_tokens": 6, "repetitions": 1, **settings}
    )
    comparison = prepare(loaded, options, never)
    for _ in comparison.rows():
        pass
    return comparison.record


def test_every_contestant_agrees_with_our_cache(tiny: LoadedModel) -> None:
    rivals = ("transformers", "transformers-static", "generate")
    choices = (NO_CACHE, *(Choice("against", name) for name in rivals))
    record = run(tiny, *choices, depths=(0, 5, 40), new_tokens=8, repetitions=2)
    for row in record.rows:
        assert [item.contestant for item in row.results] == ["kvgen", "no-cache", *rivals]
        for item in row.results[1:]:
            assert item.agreement is not None
            assert item.agreement.verdict == "exact", (row.depth, item.contestant)
            assert item.agreement.compared_steps == 16
            assert item.agreement.first_difference is None
            assert item.speedup is not None


def test_every_contestant_forwards_and_holds_what_it_should(tiny: LoadedModel) -> None:
    rivals = ("transformers", "transformers-static", "generate")
    choices = (NO_CACHE, *(Choice("against", name) for name in rivals))
    record = run(tiny, *choices, depths=(0, 40), new_tokens=8)
    assert record.model.kv_bytes_per_token is not None
    for row in record.rows:
        held = row.depth + 12 + 7
        for item in row.results:
            cached = item.contestant != "no-cache"
            assert item.kv_bytes_peak == (held * record.model.kv_bytes_per_token if cached else 0)
            assert item.kv_bytes_allocated >= item.kv_bytes_peak
            assert item.reprocessed_tokens == (
                0 if cached else sum(range(row.depth + 12, held + 1)) - 19
            )
    for one in record.runs:
        first = 12 + (one.depth if one.contestant == "no-cache" else 0)
        later = 1 if one.contestant != "no-cache" else None
        assert one.forwarded_tokens[0] == first
        assert one.forwarded_tokens[1:] == [later or first + i for i in range(1, 8)]
        assert one.total_s == sum(one.latencies_s)


def test_all_contestants_see_the_tokens_that_the_reference_chose(tiny: LoadedModel) -> None:
    record = run(tiny, NO_CACHE, depths=(3,))
    row = record.rows[0]
    ids = list(row.context_ids)
    for new in row.new_ids:
        with torch.inference_mode():
            logits = tiny.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        assert int(logits.argmax()) == new
        ids.append(new)


def policy_that_makes(kind: type[KVCache]) -> type[Step]:
    """The default storage, in caches of another class."""

    class Made(Step):
        def make(self, specs: Any) -> KVCache:
            return kind(specs)

    return Made


def damaged(monkeypatch: pytest.MonkeyPatch, change: Change) -> Choice:
    """A storage policy whose layers hand on changed pairs."""

    def spoil(cache: KVCache) -> None:
        for layer in cache.layers:
            pairs, update = layer.pairs, layer.pairs.update
            pairs.update = lambda *new, update=update: change(*update(*new))

    class Damaged(KVCache):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            spoil(self)

        def fork(self) -> KVCache:
            twin = super().fork()
            spoil(twin)
            return twin

    monkeypatch.setitem(POLICIES, "damaged", policy_that_makes(Damaged))
    return Choice("cache", "damaged")


def without_oldest(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Widths must fit the mask, so the second pair stands in for the oldest."""
    keys, values = keys.clone(), values.clone()
    keys[:, :, 0], values[:, :, 0] = keys[:, :, 1], values[:, :, 1]
    return keys, values


def with_keys_in_8_bits(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    scale = keys.abs().amax(-1, keepdim=True).clamp_min(1e-9) / 127
    return (keys / scale).round() * scale, values


def shifted(monkeypatch: pytest.MonkeyPatch) -> Choice:
    """A policy whose tokens after the first forward are placed one position too far."""

    class Shifted(KVCache):
        pass

    inputs = Forward._inputs

    def shifting(self: Forward, tokens: int, cache: Any, position: int) -> dict[str, Any]:
        wrong = position > 0 and isinstance(getattr(cache, "kv", None), Shifted)
        return inputs(self, tokens, cache, position + wrong)

    def fork(self: Shifted) -> KVCache:
        twin = KVCache.fork(self)
        twin.__class__ = Shifted
        return twin

    monkeypatch.setattr(Shifted, "fork", fork)
    monkeypatch.setattr(Forward, "_inputs", shifting)
    monkeypatch.setitem(POLICIES, "shifted", policy_that_makes(Shifted))
    return Choice("cache", "shifted")


def broken_result(record: Comparison) -> Result:
    """The only contestant's, having checked that nothing is claimed for it."""
    item = record.rows[0].results[1]
    assert item.agreement is not None
    assert item.agreement.verdict == "broken"
    assert (item.speedup, item.prefill_speedup, item.break_even_position) == (None, None, None)
    assert record.broken == [(0, item)]
    assert item.agreement.max_abs_logit_difference > item.agreement.tolerance
    return item


def test_positions_shifted_by_one_are_broken(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = broken_result(run(tiny, shifted(monkeypatch)))
    assert item.agreement is not None
    first = item.agreement.first_difference
    if first is not None:
        assert first.index >= 1  # the prefill is right
        assert first.position == 12 + first.index


def test_a_lost_oldest_pair_is_broken(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    broken_result(run(tiny, damaged(monkeypatch, without_oldest)))


def test_keys_in_8_bits_are_broken_in_float32(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_result(run(tiny, damaged(monkeypatch, with_keys_in_8_bits)))


def test_keys_in_8_bits_are_no_worse_than_bfloat16_itself(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_model(LoadOptions(str(tiny_folder), dtype="bfloat16"))
    record = run(loaded, damaged(monkeypatch, with_keys_in_8_bits), new_tokens=16)
    found = record.rows[0].results[1].agreement
    assert found is not None
    assert found.verdict in ("exact", "tolerance")
    assert 0 < found.max_abs_logit_difference <= found.tolerance
    assert record.rows[0].results[1].speedup is not None


def test_a_near_tie_that_falls_otherwise_is_tolerance() -> None:
    from kvgen.measure.agreement import LogitsCheck

    check = LogitsCheck([torch.tensor([5.0, 5.00001, 1.0])] * 2, 7, ["float32"])
    check.add(torch.tensor([5.0, 5.00001, 1.0]))
    check.add(torch.tensor([5.00002, 5.00001, 1.0]))
    check.end_run()
    found = check.result()
    assert found is not None
    assert found.verdict == "tolerance"
    assert found.first_difference is not None
    assert (found.first_difference.index, found.first_difference.position) == (1, 8)
    assert (found.first_difference.reference_id, found.first_difference.contestant_id) == (1, 0)
    assert found.first_difference.margin <= found.first_difference.abs_logit_difference
    assert found.mean_abs_logit_difference == pytest.approx(2e-5 / 6, rel=0.1)


def test_the_worst_repetition_counts_and_a_nan_is_broken() -> None:
    from kvgen.measure.agreement import LogitsCheck

    reference = [torch.tensor([1.0, 0.0])]
    for bad in (torch.tensor([9.0, 0.0]), torch.tensor([float("nan"), 0.0])):
        check = LogitsCheck(reference, 0, ["float32"])
        for logits in (bad, reference[0]):
            check.add(logits)
            check.end_run()
        found = check.result()
        assert found is not None
        assert found.verdict == "broken"


def test_logits_too_large_to_keep_are_compared_as_they_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kvgen.measure import agreement

    monkeypatch.setattr(agreement, "KEPT_BYTES", 0)
    rows = [torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])]
    check = agreement.LogitsCheck(rows, 0, ["float32"])
    for logits in rows * 2:
        check.add(logits)
    check.end_run()
    found = check.result()
    assert found is not None
    assert (found.verdict, found.compared_steps) == ("exact", 4)


def test_another_dtype_is_judged_by_the_coarser_one(tiny: LoadedModel, tiny_folder: Path) -> None:
    options = CompareOptions((Choice("dtype", "bfloat16"),), new_tokens=4, prompt_tokens=9)
    load = LoadOptions(str(tiny_folder))
    comparison = prepare(tiny, options, lambda dtype: load_model(replace(load, dtype=dtype)))
    list(comparison.rows())
    ours, theirs = comparison.record.rows[0].results
    assert [facts.dtype for facts in comparison.record.contestants] == ["float32", "bfloat16"]
    assert theirs.kv_bytes_peak * 2 == ours.kv_bytes_peak
    assert theirs.agreement is not None
    assert theirs.agreement.tolerance > 0.05


def test_sliding_windows_agree_with_both_rivals() -> None:
    ids = torch.randint(3, 120, (30,), generator=torch.Generator().manual_seed(0)).tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "_tracks", lambda *_: ([Track(ids[:20], ids[20:])], "given"))
        record = run(
            loaded_tiny("mistral"), NO_CACHE, Choice("against", "transformers"), new_tokens=10
        )
    assert [item.agreement and item.agreement.verdict for item in record.rows[0].results] == [
        None, "exact", "exact",
    ]  # fmt: skip


def test_a_rival_cache_forks_and_counts_its_bytes(tiny: LoadedModel) -> None:
    forward = Forward(tiny.model)
    for cache in (RivalCache.growing(tiny.config), RivalCache.static(tiny.config, 20)):
        forward.after([1, 2, 3], cache.raw, 0)
        cache.advance(3)
        twin = cache.fork()
        forward.after([4, 5], twin.raw, 3)
        twin.advance(2)
        per_token = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, head_dim, bytes
        assert (cache.bytes_used, twin.bytes_used) == (3 * per_token, 5 * per_token)
        assert cache.bytes_allocated >= cache.bytes_used


def test_unknown_and_repeated_contestants_are_refused() -> None:
    with pytest.raises(UsageError, match="transformers-static"):
        check_choices([Choice("against", "vllm")])
    with pytest.raises(UsageError, match="kvgen has: step"):
        check_choices([Choice("cache", "magic")])
    with pytest.raises(UsageError, match="twice"):
        check_choices([NO_CACHE, NO_CACHE])
    assert isinstance(find_policy("step").make([]), KVCache)


def test_tokens_that_do_not_fit_are_refused(tiny: LoadedModel) -> None:
    with pytest.raises(InputError, match="128"):
        run(tiny, NO_CACHE, depths=(0, 120))


def test_the_built_in_text_goes_on_from_prefix_to_prompt(tiny: LoadedModel) -> None:
    tracks = tracks_for(tiny.tokenizer, None, 10, (0, 50))
    assert tracks[0].ids == tracks[1].ids[:10]
    assert (len(tracks[1].prefix), len(tracks[1].prompt)) == (50, 10)
    assert len(builtin_ids(tiny.tokenizer, 5000)) == 5000  # longer than the text


def test_a_begin_of_text_id_stands_at_the_start_only() -> None:
    class Tokenizer:
        bos_token_id = 1

        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": [1, *(100 + ord(c) % 50 for c in text)]}

    at_0, at_8 = tracks_for(Tokenizer(), [1, 7, 8], 0, (0, 8))
    assert at_0.ids == [1, 7, 8]
    assert at_8.ids.count(1) == 1
    assert at_8.ids[-2:] == [7, 8]


def test_saved_tokens_are_replayed(tiny: LoadedModel, tmp_path: Path) -> None:
    record = run(tiny, NO_CACHE, depths=(0, 9))
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps(tokens_document("tiny", record.rows)), "utf-8")
    again = run(tiny, NO_CACHE, tokens=file)
    assert [row.context_ids for row in again.rows] == [row.context_ids for row in record.rows]
    assert [row.new_ids for row in again.rows] == [row.new_ids for row in record.rows]
    assert again.prompt_source == "tokens"
    changed = json.loads(file.read_text("utf-8"))
    changed["rows"][0]["new_ids"][2] = 77
    file.write_text(json.dumps(changed), "utf-8")
    assert run(tiny, NO_CACHE, tokens=file).rows[0].new_ids[2] == 77
    changed["rows"][0]["new_ids"][2] = 100_000
    file.write_text(json.dumps(changed), "utf-8")
    with pytest.raises(UsageError, match="vocabulary of 257"):
        run(tiny, NO_CACHE, tokens=file)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"rows": []}',
        '{"rows": [{"depth": 3, "context_ids": [1], "new_ids": [1]}]}',
    ],
)
def test_a_file_that_holds_no_tokens_is_refused(content: str, tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    file.write_text(content, "utf-8")
    with pytest.raises(UsageError, match="cannot replay"):
        read_tokens(file)


def with_tpot(record: Comparison, median: float, spread: float) -> Comparison:
    row = record.rows[0]
    ours = replace(row.results[0], tpot_s=Summary(median, spread, 0, 1, 5))
    return replace(record, rows=[replace(row, results=[ours, *row.results[1:]])])


def test_gates_say_what_they_found(tiny: LoadedModel) -> None:
    record = run(tiny, NO_CACHE)
    row = record.rows[0]
    row.results[1] = replace(row.results[1], speedup=Ratio(3.0, 0.1))
    row.results[0] = replace(
        row.results[0], tpot_s=Summary(0.05, 0, 0, 1, 5), ttft_s=Summary(0.2, 0, 0, 1, 5)
    )
    used = row.results[0].kv_bytes_peak
    limits = GateOptions(2.5, 50.0, 150.0, used - 1)
    gates = {gate.name: gate for gate in evaluate(record, limits)}
    assert [gate.passed for gate in gates.values()] == [True, True, False, False]
    assert gates["--fail-under-speedup"].value == 3.0
    assert gates["--max-ttft-ms"].value == 200.0
    assert "50 ms over the limit 150 ms" in gates["--max-ttft-ms"].message
    assert f"{used:,} bytes" in gates["--max-kv-bytes"].message
    assert not evaluate(record, GateOptions(3.5))[0].passed
    assert evaluate(record, GateOptions()) == []


def test_a_regression_must_exceed_both_the_limit_and_the_spread(tiny: LoadedModel) -> None:
    record = run(tiny, NO_CACHE)
    before = with_tpot(record, 0.100, 0.003)

    def gate(median: float, spread: float) -> Any:
        options = GateOptions(baseline=before, max_regression=0.1)
        return evaluate(with_tpot(record, median, spread), options)[0]

    assert gate(0.109, 0.001).passed  # within the limit
    assert gate(0.120, 0.040).passed  # beyond it, but so is the scatter
    assert "within the spread" in gate(0.120, 0.040).message
    failed = gate(0.125, 0.004)
    assert not failed.passed
    assert failed.value == pytest.approx(25)
    assert "25.0% slower: 15.0% over the limit 10%, spread ±5.0%" in failed.message
    assert gate(0.050, 0.001).passed


def test_a_baseline_must_share_a_depth_and_says_what_else_differs(tiny: LoadedModel) -> None:
    record = run(tiny, NO_CACHE)
    other = replace(record, environment=replace(record.environment, threads=64, cpu="other"))
    found = check_baseline(record, other)
    assert len(found) == 2
    assert "threads: 64" in found[0]
    with pytest.raises(UsageError, match="none is in both"):
        check_baseline(replace(record, depths=[7]), record)


def test_a_broken_contestant_fails_the_speedup_gate(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = run(tiny, damaged(monkeypatch, without_oldest))
    gate = evaluate(record, GateOptions(1.0))[0]
    assert not gate.passed
    assert gate.value is None


@pytest.mark.real
def test_damage_to_the_real_model_is_found(
    smollm: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"prompt_tokens": 64, "new_tokens": 8, "warmup": False}
    broken_result(run(smollm, damaged(monkeypatch, without_oldest), **settings))
    broken_result(run(smollm, damaged(monkeypatch, with_keys_in_8_bits), **settings))
    broken_result(run(smollm, shifted(monkeypatch), **settings))
    record = run(smollm, NO_CACHE, **settings)
    agreement = record.rows[0].results[1].agreement
    assert agreement is not None
    assert agreement.verdict == "exact"
