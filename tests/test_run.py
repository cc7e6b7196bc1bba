"""One measured generation under a clock that moves by hand: every number is worked out on paper."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clocks import FakeClock
from tiny import byte_alphabet

from kvgen.cache.disk import open_cache_file
from kvgen.engine.prompt import encode
from kvgen.engine.sampling import Sampler
from kvgen.engine.text import IncrementalText
from kvgen.errors import InputError
from kvgen.measure.records import Generation
from kvgen.measure.run import GenerationOptions, GenerationRun
from kvgen.models import LoadedModel

TOKENIZE, FORWARDED_TOKEN, DETOKENIZE = 0.5, 0.01, 0.002  # seconds that each is made to take
END = 256
PROMPT = "Time"  # 4 tokens, one a byte


@pytest.fixture
def clock(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeClock]:
    """Moves when the prompt is tokenized, tokens are forwarded and text is decoded."""
    clock = FakeClock()
    push = IncrementalText.push

    def slow_encode(*arguments: Any) -> list[int]:
        clock.pass_(TOKENIZE)
        return encode(*arguments)

    def slow_push(self: IncrementalText, token_id: int) -> str:
        clock.pass_(DETOKENIZE)
        return push(self, token_id)

    def slow_forward(_model: Any, _args: Any, inputs: dict[str, Any]) -> None:
        clock.pass_(FORWARDED_TOKEN * inputs["input_ids"].shape[1])

    monkeypatch.setattr("kvgen.measure.run.encode", slow_encode)
    monkeypatch.setattr("kvgen.measure.run.measured_bandwidth", lambda *_: 1e6)
    monkeypatch.setattr(IncrementalText, "push", slow_push)
    hook = tiny.model.register_forward_pre_hook(slow_forward, with_kwargs=True)
    yield clock
    hook.remove()


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have the model write a given text, whatever its logits say, and then end-of-text."""

    def script(text: str, prompt: str = PROMPT) -> None:
        ids = [byte_alphabet().index(c) for c in byte_characters(text)] + [END] * 200

        def choose(_self: Sampler, _logits: Any, so_far: list[int]) -> int:
            return ids[len(so_far) - len(prompt.encode())]

        monkeypatch.setattr(Sampler, "choose", choose)

    return script


def byte_characters(text: str) -> str:
    from tokenizers.pre_tokenizers import ByteLevel

    return str(ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0])


def start(
    loaded: LoadedModel, clock: FakeClock, new: int = 4, prompt: str = PROMPT, **options: Any
) -> GenerationRun:
    options = {"ignore_eos": True} | options
    return GenerationRun(loaded, GenerationOptions(prompt, new, **options), clock)


def finished(
    loaded: LoadedModel, clock: FakeClock, new: int = 4, **options: Any
) -> tuple[list[str], Generation]:
    run = start(loaded, clock, new, **options)
    return list(run.pieces()), run.finish()


def test_the_times_are_those_worked_out_by_hand(tiny: LoadedModel, clock: FakeClock) -> None:
    _, record = finished(tiny, clock, 5)
    # Prefill forwards 4 tokens, every later step one.
    assert [s.latency_s for s in record.steps] == pytest.approx([0.04, 0.01, 0.01, 0.01, 0.01])
    totals = record.totals
    assert totals is not None
    assert totals.tokenize_s == pytest.approx(0.5)
    assert totals.prefill_s == pytest.approx(0.04)
    assert totals.decode_s == pytest.approx(0.04)
    assert totals.ttft_s == pytest.approx(0.54)
    assert totals.tpot_s == pytest.approx(0.04 / 4)
    assert totals.detokenize_s == pytest.approx(5 * 0.002)
    assert totals.load_s == tiny.load_s
    assert totals.forwarded_tokens == 4 + 4
    # Without a cache step i forwards 4 + i tokens: 0.04 + 0.05 + 0.06 + 0.07 + 0.08.
    assert [s.recompute_s for s in record.steps] == pytest.approx([0.04, 0.05, 0.06, 0.07, 0.08])
    assert totals.recompute_s == pytest.approx(0.30)


def test_what_a_file_saves_is_what_its_tokens_took_when_they_were_computed(
    tiny: LoadedModel, clock: FakeClock, tmp_path: Path
) -> None:
    file = tmp_path / "kept"
    finished(tiny, clock, 3, prompt_cache=file)
    _, record = finished(tiny, clock, 1, prompt="Time flies", prompt_cache=file)
    assert record.reuse is not None
    assert (record.reuse.matched, record.reuse.reused, record.reuse.computed) == (4, 4, 6)
    assert record.reuse.saved_s == pytest.approx(0.04)
    assert record.totals is not None
    assert record.totals.prefill_s == pytest.approx(0.06)
    assert record.totals.ttft_s == pytest.approx(0.56)
    # 4 tokens at the old rate and 6 at the new one; decoding was not counted.
    assert open_cache_file(file).header.seconds == pytest.approx(0.10)
    # The rate of 10 tokens says little of 21.
    finished(tiny, clock, 12, prompt="Time flies", prompt_cache=file)
    assert open_cache_file(file).header.seconds is None


def test_one_token_has_no_time_per_output_token(tiny: LoadedModel, clock: FakeClock) -> None:
    _, record = finished(tiny, clock, 1)
    assert record.totals is not None
    assert record.totals.tpot_s is None
    assert record.totals.decode_s == 0
    assert record.totals.ttft_s == pytest.approx(0.54)


def test_without_a_cache_every_step_forwards_everything(
    tiny: LoadedModel, clock: FakeClock
) -> None:
    _, record = finished(tiny, clock, 3, cached=False)
    assert [s.forwarded_tokens for s in record.steps] == [4, 5, 6]
    assert [s.latency_s for s in record.steps] == pytest.approx([0.04, 0.05, 0.06])
    assert [s.recompute_s for s in record.steps] == [s.latency_s for s in record.steps]
    assert {s.recompute_source for s in record.steps} == {"measured"}
    assert {s.cached_tokens for s in record.steps} == {0}
    assert record.kv_bytes_formula is None
    assert record.check is None


def test_a_step_reads_the_weights_and_the_stored_pairs(tiny: LoadedModel, clock: FakeClock) -> None:
    _, record = finished(tiny, clock, 2)
    # 2 layers x 2 heads x (8 + 8) numbers x 4 bytes; the input embedding is read a row per token.
    pairs, row, rows = 256, 32 * 4, 257
    assert [s.kv_bytes_used for s in record.steps] == [4 * pairs, 5 * pairs]
    everything = record.model.weight_bytes
    assert record.steps[0].bytes_read == everything - (rows - 4) * row + 4 * pairs
    assert record.steps[1].bytes_read == everything - (rows - 1) * row + 5 * pairs
    for step in record.steps:
        assert step.bandwidth_share == pytest.approx(step.bytes_read / step.latency_s / 1e6)


def test_warming_up_runs_both_shapes_and_leaves_the_measured_cache_alone(
    tiny: LoadedModel, clock: FakeClock
) -> None:
    shapes: list[int] = []
    hook = tiny.model.register_forward_pre_hook(
        lambda _m, _a, inputs: shapes.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        run = start(tiny, clock, 2, prompt="Time flies like")
        # A prompt's beginning, one token, and the same without a cache as a first proof.
        assert shapes == [8, 1, 9]
        list(run.pieces())
        assert shapes == [8, 1, 9, 15, 1]
        shapes.clear()
        start(tiny, clock, 2, warmup=False)
        assert shapes == []
    finally:
        hook.remove()
    assert [s.cached_tokens for s in run.record.steps] == [15, 16]


def test_warming_up_changes_neither_text_nor_seeded_draws(
    tiny: LoadedModel, clock: FakeClock
) -> None:
    from kvgen.engine.sampling import SamplingOptions

    sampling = SamplingOptions(temperature=2.0, seed=3)
    with_it, without = (
        finished(tiny, clock, 12, sampling=sampling, warmup=warmup)[1] for warmup in (True, False)
    )
    assert [s.token_id for s in with_it.steps] == [s.token_id for s in without.steps]


def test_a_run_ends_when_it_is_long_enough(
    tiny: LoadedModel, clock: FakeClock, writes: Any
) -> None:
    writes("abcdef")
    pieces, record = finished(tiny, clock, 4)
    assert pieces == ["a", "b", "c", "d"]
    assert (record.text, record.finish_reason, len(record.steps)) == ("abcd", "length", 4)


@pytest.mark.parametrize("end", [END, 17])
def test_any_end_of_text_id_ends_a_run(
    tiny: LoadedModel, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, end: int
) -> None:
    monkeypatch.setattr(Sampler, "choose", lambda _s, _l, ids: end if len(ids) == 6 else 40)
    both = dataclasses.replace(tiny, stop_ids=frozenset({END, 17}))
    _, record = finished(both, clock, 9, ignore_eos=False)
    assert [s.token_id for s in record.steps] == [40, 40, end]
    assert record.finish_reason == "end"
    _, on = finished(both, clock, 9)
    assert (len(on.steps), on.finish_reason) == (9, "length")


def test_end_of_text_has_a_name_but_no_text(
    tiny: LoadedModel, clock: FakeClock, writes: Any
) -> None:
    writes("ab")
    pieces, record = finished(tiny, clock, 9, ignore_eos=False)
    assert pieces == ["a", "b", ""]
    assert (record.steps[-1].token, record.steps[-1].text) == ("<|end|>", "")
    assert record.text == "ab"


def test_a_stop_string_is_found_across_tokens_and_not_shown(
    tiny: LoadedModel, clock: FakeClock, writes: Any
) -> None:
    writes("one two\n\nthree")
    pieces, record = finished(tiny, clock, 14, stop=("\n\n", "zzz"))
    assert "".join(pieces) == record.text == "one two"
    assert (record.finish_reason, record.stop_string) == ("stop", "\n\n")
    # The steps keep all that was generated.
    assert "".join(s.text for s in record.steps) == "one two\n\n"


def test_a_stop_string_at_once_leaves_no_text(
    tiny: LoadedModel, clock: FakeClock, writes: Any
) -> None:
    writes("x")
    pieces, record = finished(tiny, clock, 5, stop=("x",))
    assert (pieces, record.text, record.finish_reason) == ([""], "", "stop")


def test_what_only_began_a_stop_string_is_shown_at_the_end(
    tiny: LoadedModel, clock: FakeClock, writes: Any
) -> None:
    writes("abSTO")
    pieces, record = finished(tiny, clock, 5, stop=("STOP",))
    assert pieces == ["a", "b", "", "", "STO"]
    assert (record.text, record.finish_reason) == ("abSTO", "length")


def test_end_of_text_after_the_beginning_of_a_stop_string_shows_it(
    tiny: LoadedModel, clock: FakeClock, writes: Any
) -> None:
    writes("abST")
    pieces, record = finished(tiny, clock, 9, stop=("STOP",), ignore_eos=False)
    assert "".join(pieces) == record.text == "abST"
    assert record.finish_reason == "end"


def test_half_a_character_is_shown_only_when_the_run_is_over(
    tiny: LoadedModel, clock: FakeClock, writes: Any
) -> None:
    writes("aé")
    pieces, record = finished(tiny, clock, 3)
    assert pieces == ["a", "", "é"]
    pieces, record = finished(tiny, clock, 2)
    assert pieces == ["a", "\ufffd"]
    assert record.text == "a\ufffd"


def test_an_interruption_gives_back_what_was_held_and_is_noted(
    tiny: LoadedModel, clock: FakeClock, writes: Any
) -> None:
    writes("abSTOP")
    run = start(tiny, clock, 6, stop=("STOP",))
    pieces = run.pieces()
    assert [next(pieces) for _ in range(4)] == ["a", "b", "", ""]
    assert run.interrupted() == "ST"
    record = run.finish()
    assert (record.text, record.finish_reason) == ("abST", "interrupted")
    assert len(record.steps) == 4
    assert record.check is None
    assert any("interrupted" in note for note in record.notes)
    assert {s.recompute_s for s in record.steps} == {None}
    assert record.totals is not None
    assert record.totals.recompute_s is None


def test_an_interruption_before_the_first_token_leaves_an_empty_record(
    tiny: LoadedModel, clock: FakeClock
) -> None:
    run = start(tiny, clock)
    assert run.interrupted() == ""
    record = run.finish()
    assert (record.steps, record.text, record.totals) == ([], "", None)


def test_a_budget_that_runs_out_is_noted(
    tiny: LoadedModel, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvgen.measure.run._LEAST_BUDGET_S", 0.0)
    _, record = finished(tiny, clock, 30)
    # Generating took 0.04 + 29 * 0.01 = 0.33 s. The first uncached forward is over 33 tokens, the
    # second would take as long, and neither it nor anything after it fits.
    measured = [s for s in record.steps if s.recompute_source == "measured"]
    assert [s.index for s in measured] == [29]
    assert any("time budget" in note for note in record.notes)
    assert record.check is not None
    assert len(record.check.steps) == 1


def test_all_measures_every_step_whatever_it_takes(
    tiny: LoadedModel, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvgen.measure.run._LEAST_BUDGET_S", 0.0)
    _, record = finished(tiny, clock, 20, recompute="all")
    assert {s.recompute_source for s in record.steps} == {"measured"}
    assert [s.recompute_s for s in record.steps] == pytest.approx(
        [FORWARDED_TOKEN * (4 + i) for i in range(20)]
    )
    assert record.notes == []


def test_off_measures_nothing(tiny: LoadedModel, clock: FakeClock) -> None:
    _, record = finished(tiny, clock, 3, recompute="off")
    assert {(s.recompute_s, s.recompute_source) for s in record.steps} == {(None, None)}
    assert record.check is None


def test_a_prefill_in_chunks_is_one_step(tiny: LoadedModel, clock: FakeClock) -> None:
    whole, chunked = (
        finished(tiny, clock, 6, prompt="Time flies", prefill_chunk=chunk)[1] for chunk in (None, 3)
    )
    assert [s.token_id for s in whole.steps] == [s.token_id for s in chunked.steps]
    assert chunked.steps[0].forwarded_tokens == 10
    assert chunked.steps[0].latency_s == pytest.approx(0.10)
    assert chunked.prefill_chunk == 3


def test_unasked_the_length_is_64_or_what_still_fits(tiny: LoadedModel, clock: FakeClock) -> None:
    def wanted(prompt: str) -> int:
        options = GenerationOptions(prompt)
        return GenerationRun(tiny, options, clock).record.max_new_tokens

    assert wanted("x" * 10) == 64
    assert wanted("x" * 100) == 28
    assert wanted("x" * 127) == 1
    with pytest.raises(InputError, match=r"128 tokens .* 128"):
        wanted("x" * 128)


def test_the_drawn_seed_is_in_the_record_and_repeats_the_run(
    tiny: LoadedModel, clock: FakeClock
) -> None:
    from kvgen.engine.sampling import SamplingOptions

    _, first = finished(tiny, clock, 10, sampling=SamplingOptions(temperature=3.0))
    seed = first.sampling["seed"]
    assert isinstance(seed, int)
    _, again = finished(tiny, clock, 10, sampling=SamplingOptions(temperature=3.0, seed=seed))
    assert [s.token_id for s in first.steps] == [s.token_id for s in again.steps]
