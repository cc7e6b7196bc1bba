"""Many prompts together: each row as if it ran alone, and no token of a prefix computed twice."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from families import WINDOW
from hypothesis import given, settings
from hypothesis import strategies as st
from loaded import loaded_tiny
from oracle import decoder, new_cache, steps
from test_reuse import holding

from kvgen.cache.adapter import TransformersCache
from kvgen.cache.manager import KVCache
from kvgen.cache.prefix_plan import PrefixPlan
from kvgen.cache.prefix_spans import PrefixSpans
from kvgen.cache.trie import common_prefix
from kvgen.engine.batch import Row, RowBatch
from kvgen.engine.sampling import Sampler, SamplingOptions
from kvgen.errors import InputError, UsageError
from kvgen.measure import guard
from kvgen.measure.batch import BatchRun
from kvgen.measure.batch_prompts import BatchOptions
from kvgen.measure.batch_records import RowResult
from kvgen.measure.requests import Request
from kvgen.models import LoadedModel

TEXT = "the quick brown fox jumps over the lazy dog and runs away"
# What two prompts have in common: around the window, all but one token, all.
MATCHES = (1, WINDOW - 1, WINDOW, WINDOW + 1, 23, 24)
KINDS = [
    "llama",
    "gemma3_text",  # sliding and full
    "llama4_text",  # chunked and full
    "deepseek_v3",  # latent
    "bloom",  # biased by distance
    "gpt2",  # learned positions
]
NEWEST_KINDS = [
    "mamba2",  # recurrent
    "qwen3_next",  # recurrent and full
    "lfm2",  # convolutions and full
    "zaya",  # hybrid layers, some with a window
    "glm_moe_dsa",  # indexed
    "gemma3n_text",  # shared
    "dots3_note_text",  # other sizes in layers with a window
]


def requests() -> list[Request]:
    """Prompts of many lengths, the first of them shared in part by others, one twice."""
    first = TEXT[:24]
    texts = [first, TEXT[30:33], *(first[:n] + "XYZ" for n in MATCHES), first, TEXT, TEXT[:50]]
    return [Request(str(i), text, max_new_tokens=2 + 5 * i % 17) for i, text in enumerate(texts)]


def run(loaded: LoadedModel, wanted: list[Request], **options: Any) -> tuple[BatchRun, list[Any]]:
    """The run and its results in the order of the requests."""
    batch = BatchRun(loaded, wanted, BatchOptions(**options))
    found = {result.id: result for result in batch.rows()}
    return batch, [found[request.id] for request in wanted]


def alone(loaded: LoadedModel, request: Request) -> list[int]:
    ids = loaded.tokenizer(request.prompt)["input_ids"]
    running = decoder(loaded.model, ids, new_cache(loaded.model))
    return steps(running, request.max_new_tokens or 0).ids


@pytest.mark.parametrize(
    "model_type", KINDS + [pytest.param(kind, marks=pytest.mark.newest) for kind in NEWEST_KINDS]
)
def test_every_row_is_what_it_is_alone(model_type: str) -> None:
    loaded, wanted = loaded_tiny(model_type), requests()
    batch, results = run(loaded, wanted, batch_size=3, cache="step:16")
    assert batch.summary.notes == []
    assert batch.summary.batch_size == 3
    for request, result in zip(wanted, results, strict=True):
        assert result.new_ids == alone(loaded, request), request
    assert batch.summary.computed_tokens == least([loaded.tokenizer(r.prompt) for r in wanted])


def least(prompts: list[Any]) -> int:
    """Distinct prefixes, and one token for each prompt that an earlier one contains whole."""
    root: dict[int, Any] = {}
    count = 0
    for prompt in prompts:
        node, new = root, 0
        for token in prompt["input_ids"]:
            new += token not in node
            node = node.setdefault(token, {})
        count += max(1, new)
    return count


@pytest.mark.parametrize(
    ("model_type", "cache", "why"),
    [
        ("bart", "step", "bart predicts otherwise for a row that is padded"),
        ("llama", "int8", "the storage policy treats tokens by their place"),
        ("llama", "window:6,sink:2", "the storage policy treats tokens by their place"),
        pytest.param("deepseek_v4", "step", "pools tokens by", marks=pytest.mark.newest),
        pytest.param("minimax_m3_vl_text", "step", "chooses tokens by", marks=pytest.mark.newest),
        pytest.param("git", "step", "counts the columns of its mask", marks=pytest.mark.newest),
    ],
)
def test_what_cannot_be_padded_runs_row_by_row_and_says_so(
    model_type: str, cache: str, why: str
) -> None:
    loaded, wanted = loaded_tiny(model_type), requests()[:5]
    batch, results = run(loaded, wanted, cache=cache)
    assert batch.summary.batch_size == 1
    assert why in batch.summary.notes[0]
    if cache == "step":
        assert [r.new_ids for r in results] == [alone(loaded, r) for r in wanted]


@pytest.mark.newest
def test_a_type_that_starts_its_state_over_shares_nothing_and_says_so() -> None:
    loaded, wanted = loaded_tiny("mamba"), requests()
    batch, results = run(loaded, wanted, batch_size=3)
    assert "mamba starts its state over" in batch.summary.notes[0]
    assert batch.summary.reused_tokens == 0
    assert [r.new_ids for r in results] == [alone(loaded, r) for r in wanted]


def test_a_thousand_prompts_compute_their_common_instruction_once() -> None:
    loaded = loaded_tiny("llama", max_position_embeddings=1024)
    instruction = (TEXT * 10)[:500]
    texts = [instruction + f"{i % 900}" for i in range(1000)]  # some are there twice
    forwarded = 0

    def count(_: Any, arguments: Any, keywords: Any) -> None:
        nonlocal forwarded
        ids = keywords["input_ids"]
        forwarded += ids.numel() if len(ids) == 1 else 0

    wanted = [Request(i, text, max_new_tokens=2) for i, text in enumerate(texts)]
    batch = BatchRun(loaded, wanted, BatchOptions(batch_size=4))
    hook = loaded.model.register_forward_pre_hook(count, with_kwargs=True)
    results = list(batch.rows())
    hook.remove()
    minimum = least([loaded.tokenizer(text) for text in texts])
    assert minimum < 500 + 1000 * 3
    assert batch.summary.computed_tokens == minimum == forwarded
    assert sum(r.receipt.computed for r in results) == minimum
    assert batch.summary.kv_bytes_peak < 20_000_000  # the instruction is there once
    assert batch._stored.bytes_allocated == 0  # whoever was last let go of it


@pytest.mark.parametrize("longest", [20, 40])
def test_rows_past_a_change_of_rotary_base_run_alone_and_share_nothing(longest: int) -> None:
    scaled = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    loaded = loaded_tiny("llama", max_position_embeddings=32, rope_parameters=scaled)
    loaded = replace(loaded, rotary_change=32)
    wanted = [Request(i, TEXT[:n], max_new_tokens=4) for i, n in enumerate((longest, 17, 17))]
    batch, results = run(loaded, wanted)
    assert [r.new_ids for r in results] == [alone(loaded, r) for r in wanted]
    assert len(batch.summary.notes) == (0 if longest == 20 else 2)
    assert (batch.summary.reused_tokens > 0) == (longest == 20)


def test_without_sharing_every_prompt_is_forwarded_whole() -> None:
    loaded, wanted = loaded_tiny("llama"), requests()
    shared, plain = run(loaded, wanted)[0], run(loaded, wanted, share_prefix=False)[0]
    assert plain.summary.computed_tokens == plain.summary.prompt_tokens
    assert plain.summary.saved_s == 0
    assert shared.summary.computed_tokens < plain.summary.computed_tokens


@pytest.mark.parametrize(
    ("model_type", "budget"),
    [("gemma3_text", 0), ("gemma3_text", 30_000), ("llama", 0), ("llama", 3_000)],
)
def test_prefixes_beyond_the_budget_are_computed_again(model_type: str, budget: int) -> None:
    loaded, wanted = loaded_tiny(model_type), requests()
    batch, results = run(loaded, wanted, prefix_budget=budget, cache="step:16")
    assert batch.summary.computed_tokens > least([loaded.tokenizer(r.prompt) for r in wanted])
    assert [r.new_ids for r in results] == [alone(loaded, r) for r in wanted]


@pytest.mark.parametrize("share", [True, False])
def test_draws_do_not_depend_on_what_runs_beside(share: bool) -> None:
    loaded = loaded_tiny("llama")
    sampling = SamplingOptions(temperature=1.0, seed=3)
    wanted = [*requests(), Request("own", TEXT, max_new_tokens=9, seed=11)]
    _, expected = run(loaded, wanted, sampling=sampling, batch_size=1, share_prefix=False)
    _, found = run(loaded, wanted[::-1], sampling=sampling, batch_size=4, share_prefix=share)
    assert [r.new_ids for r in found[::-1]] == [r.new_ids for r in expected]
    assert expected[-1].seed == 11
    assert len({result.seed for result in expected}) == len(expected)
    assert [r.request for r in found[::-1]] == [r.request for r in expected]


def test_rows_end_by_stop_string_end_of_text_or_number() -> None:
    loaded = loaded_tiny("llama")
    _, (plain,) = run(loaded, [Request("a", TEXT, max_new_tokens=12)])
    end = plain.new_ids[5]
    ending = replace(loaded, stop_ids=frozenset({end}))
    first = plain.new_ids.index(end)
    wanted = [
        Request("a", TEXT, max_new_tokens=12),
        Request("b", TEXT, max_new_tokens=1),
        Request("c", TEXT, max_new_tokens=12, stop=(plain.text[1:3],)),
    ]
    _, (a, b, c) = run(ending, wanted)
    assert (a.finish_reason, a.new_ids) == ("end", plain.new_ids[: first + 1])
    assert (b.finish_reason, b.new_ids, b.timing.tpot_s) == ("length", plain.new_ids[:1], None)
    assert (c.finish_reason, c.text, c.stop_string) == ("stop", plain.text[:1], plain.text[1:3])


def test_a_prompt_that_does_not_fit_is_rejected_and_the_others_run() -> None:
    loaded = loaded_tiny("llama", limit=30)
    wanted = [Request("long", TEXT, line=1), Request("", "", line=2), Request("ok", "the fox")]
    batch, results = BatchRun(loaded, wanted), []
    results = list(batch.rows())
    assert [one.line for one in batch.rejected] == [1, 2]
    assert "57 tokens" in batch.rejected[0].reason
    assert "empty" in batch.rejected[1].reason
    assert [result.id for result in results] == ["ok"]
    assert len(results[0].new_ids) == 23


def test_results_of_an_earlier_run_are_skipped_only_if_they_answer_the_same() -> None:
    loaded, wanted = loaded_tiny("llama"), requests()
    _, results = run(loaded, wanted)
    finished = {result.id: result.request for result in results[:4]}
    rest = BatchRun(loaded, wanted, finished=finished)
    again = {result.id: result.new_ids for result in rest.rows()}
    assert again == {result.id: result.new_ids for result in results[4:]}
    assert rest.summary.already_finished == 4
    with pytest.raises(UsageError, match='"3" was made from a prompt or settings that differ'):
        BatchRun(loaded, [*wanted[:3], replace(wanted[3], max_new_tokens=1)], finished=finished)
    with pytest.raises(UsageError, match='"3" was made from a prompt not given now'):
        BatchRun(loaded, wanted[:3], finished=finished)
    with pytest.raises(UsageError, match='two prompts have the id "0"'):
        BatchRun(loaded, [wanted[0], wanted[0]])


def test_rows_that_do_not_fit_into_memory_are_refused_with_a_number_that_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded = loaded_tiny("llama")
    wanted = [Request(i, TEXT, max_new_tokens=64) for i in range(8)]
    monkeypatch.setattr(guard, "free_bytes", lambda device: 500_000)
    with pytest.raises(InputError, match=r"for 8 rows.*--batch-size [1-7] would fit"):
        BatchRun(loaded, wanted)
    assert BatchRun(loaded, wanted, BatchOptions(force=True)).total == 8


def test_times_add_up() -> None:
    batch, results = run(loaded_tiny("llama"), requests())
    assert all(r.timing.waited_s >= 0 and r.timing.ttft_s > 0 for r in results)
    assert 0 < sum(r.timing.share_s for r in results) <= batch.summary.wall_s
    assert batch.summary.new_tokens == sum(len(r.new_ids) for r in results)


prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=9)


@settings(max_examples=150, deadline=None)
@given(prompts)
def test_the_plan_sets_in_where_the_longest_earlier_match_ends(given_: list[list[int]]) -> None:
    plan = PrefixPlan(given_)
    held: Counter[tuple[int, ...]] = Counter()
    forwarded = 0
    for index, prompt in enumerate(given_):
        turn = plan.next(prompt)
        forwarded += len(prompt) - turn.start
        best = max((common_prefix(one, prompt) for one in given_[:index]), default=0)
        assert turn.start == min(best, len(prompt) - 1)
        if turn.start:
            assert held[tuple(prompt[: turn.start])]
            if turn.finished_with:
                del held[tuple(prompt[: turn.start])]
        for stop in turn.stops:
            held[tuple(prompt[:stop])] += 1
    assert not held
    assert forwarded == least([{"input_ids": prompt} for prompt in given_])


@settings(max_examples=150, deadline=None)
@given(stored=prompts, asked=prompts, dropped=st.sets(st.integers(0, 8)))
def test_spans_give_the_longest_stored_prefix_and_hold_only_what_it_adds(
    stored: list[list[int]], asked: list[list[int]], dropped: set[int]
) -> None:
    spans = PrefixSpans(holding([]))
    for ids in sorted(stored, key=len):
        spans.add(ids, holding(ids))
    gone = [stored[index] for index in dropped if index < len(stored)]
    for ids in gone:
        spans.drop(ids)
    left = [ids for ids in stored if ids not in gone]
    assert len(spans) == len({tuple(ids) for ids in left})
    for prompt in asked:
        cache, receipt = spans.take(prompt)
        best = max((len(ids) for ids in left if prompt[: len(ids)] == ids), default=0)
        assert receipt.reused >= min(best, len(prompt) - 1)
        held = keys_of(cache, 0)[0, 0, :, 0].int().tolist() if cache else []
        assert held == prompt[: receipt.reused]
    if not gone:
        distinct = {tuple(ids) for ids in stored}
        before = [
            max((len(one) for one in distinct if one != ids and one == ids[: len(one)]), default=0)
            for ids in distinct
        ]
        # 16 bytes of keys and values for a token
        assert spans.bytes_allocated == 16 * (sum(map(len, distinct)) - sum(before))
    for ids in stored:
        spans.drop(ids)
    assert spans.bytes_allocated == len(spans) == 0


class Ids:
    """A forward whose pairs are the ids themselves, and whose next token is the sum so far."""

    @torch.inference_mode()
    def rows(self, newest: list[list[int]], padding: list[int], cache: TransformersCache) -> Any:
        pair = torch.tensor(newest, dtype=torch.float32)[:, None, :, None].expand(-1, -1, -1, 2)
        for layer in cache.kv.layers:
            layer.pairs.update(pair, pair)
        cache.kv.advance(1)
        held = [row[0, pad:, 0] for row, pad in zip(keys_of(cache.kv, 0), padding, strict=True)]
        return torch.stack([one_hot(int(row.sum()) % 7) for row in held])[:, None]


def one_hot(index: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(index), 7).float()


def keys_of(cache: KVCache, layer: int) -> torch.Tensor:
    pairs = cache.layers[layer].pairs
    assert pairs is not None
    return pairs.views[0]


moves = st.one_of(st.just("step"), st.integers(1, 60), st.floats(0, 0.99))


@settings(max_examples=60, deadline=None)
@given(st.lists(moves, max_size=60))
def test_rows_that_come_and_go_keep_what_is_theirs(moves: list[Any]) -> None:
    batch = RowBatch(Ids(), 3)  # type: ignore[arg-type]
    for move in [*moves, "step"]:
        if isinstance(move, int):
            ids = [1 + i % 5 for i in range(move)]
            batch.join(Row([*ids, 6], Sampler(SamplingOptions())), holding(ids, 4))
        elif isinstance(move, float) and batch.rows:
            batch.leave(batch.rows[int(move * len(batch.rows))])
        elif move == "step" and batch.rows:
            sums = [sum(row.ids) % 7 for row in batch.rows]
            assert batch.step() == sums
            assert batch._cache is not None
            for index, row in enumerate(batch.rows):
                for layer, most in ((0, 10**6), (1, 3)):
                    mine = row.ids[:-1][-most:]
                    held = keys_of(batch._cache.kv, layer)[index, 0, :, 0].int().tolist()
                    assert held[len(held) - len(mine) :] == mine
            assert min(batch._padding) <= max(32, batch._cache.kv.position // 8)


def test_a_step_writes_one_slot_and_a_row_that_joins_copies_only_itself() -> None:
    batch = RowBatch(Ids(), 3)  # type: ignore[arg-type]
    rows = [Row([1, 2, 3], Sampler(SamplingOptions())) for _ in range(3)]
    for row in rows:
        batch.join(row, holding(row.ids[:-1], 4))
    batch.step()
    assert batch._cache is not None
    before = batch._cache.kv.layers[0].pairs.buffers()[0].data_ptr()  # type: ignore[union-attr]
    batch.leave(rows[1])
    batch.join(Row([5, 6], Sampler(SamplingOptions())), holding([5], 4))
    batch.step()
    after = batch._cache.kv.layers[0].pairs.buffers()[0].data_ptr()  # type: ignore[union-attr]
    assert before == after


@pytest.mark.real
def test_smollm_rows_are_what_they_are_alone(smollm: LoadedModel) -> None:
    text = "The capital of France is Paris. The capital of "
    endings = ("Italy is", "Spain is the city of", "", "Italy is Rome, and")
    wanted = [Request(i, text + end, max_new_tokens=6 + 4 * i) for i, end in enumerate(endings)]
    batch, results = run(smollm, wanted, batch_size=3, ignore_eos=True)
    assert [r.new_ids for r in results] == [alone(smollm, r) for r in wanted]
    assert batch.summary.computed_tokens == least([smollm.tokenizer(r.prompt) for r in wanted])


def test_a_result_is_data_of_its_own() -> None:
    _, results = run(loaded_tiny("llama"), requests()[:2])
    assert all(isinstance(result, RowResult) for result in results)
    assert results[0].receipt.submitted == results[0].prompt_tokens == 24
