"""A prompt's beginning from a file: the same text as without it, and a receipt that is right."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from families import WINDOW
from loaded import loaded_tiny

from kvgen.cache.reuse import ONE_TOKEN
from kvgen.errors import UsageError
from kvgen.measure.prompt_cache import SNAPSHOT_ONLY, TEMPLATE
from kvgen.measure.records import Generation
from kvgen.measure.run import GenerationOptions, GenerationRun
from kvgen.models import LoadedModel

LONG = "abcdefghijklmnopqrstu"  # 21 tokens, one a letter: more than two windows
SHORT = "abcde"


def newest(value: str) -> Any:
    """What needs the newest transformers."""
    return pytest.param(value, marks=pytest.mark.newest)


# One of each kind of layer, and every mixture that a cache must get right.
KINDS = [
    "llama",
    "gemma3_text",
    "llama4_text",
    "gpt_neo",
    "mamba2",
    "recurrent_gemma",
    "qwen3_next",
    "lfm2",
    "falcon_h1",
    "gemma3n_text",
    "deepseek_v3",
    newest("glm_moe_dsa"),
    newest("minimax_m3_vl_text"),
    newest("deepseek_v4"),
    newest("qwen4_exp_text"),
    newest("inkling_text"),
    newest("zaya"),
]


def run(loaded: LoadedModel, prompt: str, file: Path | None = None, **options: Any) -> Generation:
    options = {
        "max_new_tokens": 3,
        "warmup": False,
        "recompute": "off",
        "ignore_eos": True,
    } | options
    running = GenerationRun(loaded, GenerationOptions(prompt, prompt_cache=file, **options))
    for _ in running.pieces():
        pass
    return running.finish()


def new_ids(record: Generation) -> list[int]:
    return [step.token_id for step in record.steps]


@pytest.mark.parametrize("stored", [SHORT, LONG])
@pytest.mark.parametrize("model_type", KINDS)
def test_reuse_gives_the_ids_of_a_fresh_run(model_type: str, stored: str, tmp_path: Path) -> None:
    loaded = loaded_tiny(model_type)
    file = tmp_path / "kept"
    kept = run(loaded, stored, file).kept
    assert kept is not None
    assert kept.why_not is None
    count = len(stored)
    assert kept.tokens == (count - 1 if kept.snapshot else count + 2)
    matches = {1, WINDOW - 1, WINDOW, WINDOW + 1, count - 1, count}
    for matched in sorted(m for m in matches if m <= count):
        prompt = stored[:matched] + ("ZYX" if matched < count else "")
        record = run(loaded, prompt, file, prompt_cache_read_only=True)
        assert new_ids(record) == new_ids(run(loaded, prompt)), matched
        reuse = record.reuse
        assert reuse is not None
        assert (reuse.submitted, reuse.matched) == (len(prompt), min(matched, kept.tokens))
        serves = not kept.snapshot or matched >= count - 1
        assert reuse.reused == (min(matched, len(prompt) - 1) if serves else 0), matched
        assert reuse.computed == len(prompt) - reuse.reused == record.steps[0].forwarded_tokens
        assert (reuse.why_fewer is None) == (reuse.reused == reuse.matched)


@pytest.mark.parametrize("policy", ["exact", "int8", "window:9,sink:2"])
def test_policies_are_read_back_as_they_were_stored(policy: str, tmp_path: Path) -> None:
    loaded = loaded_tiny("llama")
    file = tmp_path / "kept"
    first = run(loaded, LONG, file, cache=policy)
    again = run(loaded, LONG, file, cache=policy)
    assert again.reuse is not None
    assert again.reuse.reused == len(LONG) - 1
    assert new_ids(again) == new_ids(first)


def test_a_conversation_grows_in_its_file(tmp_path: Path) -> None:
    loaded, file = loaded_tiny("llama"), tmp_path / "kept"
    one = run(loaded, "abcd", file)
    assert one.kept is not None
    assert (one.kept.tokens, one.kept.snapshot) == (6, False)
    two = run(loaded, "abcdefgh", file)
    assert two.reuse is not None
    assert (two.reuse.matched, two.reuse.reused, two.reuse.file_tokens) == (4, 4, 6)
    assert "differ from token 5 on" in (two.reuse.why_no_further or "")
    assert two.kept is not None
    assert two.kept.tokens == 10
    three = run(loaded, "abcdefgh", file)
    assert three.reuse is not None
    assert (three.reuse.reused, three.reuse.why_fewer) == (7, ONE_TOKEN)
    assert three.kept is not None
    assert three.kept.why_not == "it holds the same tokens already"


def test_a_snapshot_says_that_it_is_all_there_is(tmp_path: Path) -> None:
    loaded, file = loaded_tiny("mamba2"), tmp_path / "kept"
    run(loaded, "abcd", file)
    reuse = run(loaded, "abcdefgh", file, prompt_cache_read_only=True).reuse
    assert reuse is not None
    assert (reuse.matched, reuse.reused, reuse.why_no_further) == (3, 3, SNAPSHOT_ONLY)
    reuse = run(loaded, "abXX", file, prompt_cache_read_only=True).reuse
    assert reuse is not None
    assert (reuse.matched, reuse.reused) == (2, 0)
    assert "sums up every token and cannot go back" in (reuse.why_fewer or "")


def test_a_run_that_may_not_write_leaves_the_file_alone(tmp_path: Path) -> None:
    loaded, file = loaded_tiny("llama"), tmp_path / "kept"
    run(loaded, "abcd", file)
    before = file.read_bytes()
    assert run(loaded, "xyz", file, prompt_cache_read_only=True).kept is None
    assert file.read_bytes() == before


def test_without_a_file_everything_is_computed_and_the_receipt_says_so() -> None:
    loaded = loaded_tiny("llama")
    for cached in (True, False):
        record = run(loaded, "abcd", cached=cached)
        assert record.reuse is not None
        assert (record.reuse.submitted, record.reuse.reused, record.reuse.computed) == (4, 0, 4)
        assert record.kept is None


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "mamba2", "qwen3_next"])
@pytest.mark.parametrize("at", [0, 2])
def test_a_ctrl_c_within_a_forward_leaves_a_cache_that_is_whole(
    model_type: str, at: int, tmp_path: Path
) -> None:
    loaded, file = loaded_tiny(model_type), tmp_path / "kept"
    forwards = 0
    layers = [m for m in loaded.model.modules() if type(getattr(m, "layer_idx", None)) is int]

    def interrupt(module: Any, _arguments: Any) -> None:
        nonlocal forwards
        forwards += module.layer_idx == layers[-1].layer_idx and module is layers[-1]
        if forwards > at:
            raise KeyboardInterrupt

    hook = layers[-1].register_forward_pre_hook(interrupt)
    options = GenerationOptions(LONG, 5, prompt_cache=file, warmup=False, ignore_eos=True)
    running = GenerationRun(loaded, options)
    with pytest.raises(KeyboardInterrupt):
        list(running.pieces())
    hook.remove()
    running.interrupted()
    kept = running.finish().kept
    assert kept is not None
    if kept.why_not is not None:
        assert at == 0
        assert not file.exists()
        return
    record = run(loaded, LONG, file)
    assert new_ids(record) == new_ids(run(loaded, LONG))
    assert record.reuse is not None
    assert record.reuse.reused == len(LONG) - 1


def test_a_changed_chat_template_explains_a_short_match(tiny: LoadedModel, tmp_path: Path) -> None:
    file = tmp_path / "kept"
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}>"
    tiny.tokenizer.chat_template = template
    try:
        run(tiny, "Hello", file, chat=True)
        tiny.tokenizer.chat_template = template.replace("<", "<|")
        reuse = run(tiny, "Hello", file, chat=True, prompt_cache_read_only=True).reuse
        assert reuse is not None
        assert (reuse.matched, reuse.reused, reuse.why_no_further) == (1, 1, TEMPLATE)
    finally:
        tiny.tokenizer.chat_template = None


def test_keys_of_another_rotary_base_are_not_taken(tmp_path: Path) -> None:
    loaded, file = loaded_tiny("llama"), tmp_path / "kept"
    loaded.rotary_change = 12
    run(loaded, "abcdefgh", file)
    short = run(loaded, "abcdefgX", file, prompt_cache_read_only=True).reuse
    long = run(loaded, "abcdefghijklmno", file, prompt_cache_read_only=True).reuse
    assert short is not None
    assert short.reused == 7
    assert long is not None
    assert (long.matched, long.reused) == (8, 0)
    assert "another rotary base" in (long.why_fewer or "")


def test_the_memory_guard_counts_only_what_is_still_to_be_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, file = loaded_tiny("llama"), tmp_path / "kept"
    chunks: list[int] = []
    monkeypatch.setattr(
        "kvgen.measure.run.check_before_growing", lambda *args: chunks.append(args[-1].chunk)
    )
    run(loaded, LONG, file)
    run(loaded, LONG + "xyz", file)
    assert chunks == [len(LONG), 3]


def test_another_policy_or_model_is_refused_by_name(tmp_path: Path) -> None:
    loaded, file = loaded_tiny("llama"), tmp_path / "kept"
    run(loaded, "abcd", file)
    before = file.read_bytes()
    with pytest.raises(UsageError, match="--cache plain, not int8"):
        run(loaded, "abcd", file, cache="int8")
    other = loaded_tiny("llama")
    other.model.lm_head.weight[7, 7] += 1e-3
    with pytest.raises(UsageError, match="another set of weights"):
        run(other, "abcd", file)
    with pytest.raises(UsageError, match="another model configuration"):
        run(loaded_tiny("gemma3_text"), "abcd", file)
    assert file.read_bytes() == before


@pytest.mark.real
def test_smollm_gives_the_same_text_and_the_check_finds_it_exact(
    smollm: LoadedModel, tmp_path: Path
) -> None:
    file, text = tmp_path / "kept", "The quick brown fox jumps over the lazy dog and runs away"
    run(smollm, text, file)
    for prompt in (text, text + " from all", text[:40] + " a river", "The end"):
        copy = Path(shutil.copy(file, tmp_path / "copy"))
        record = run(smollm, prompt, copy, recompute="sampled")
        assert new_ids(record) == new_ids(run(smollm, prompt))
        assert record.check is not None
        assert record.check.verdict == "exact"
        assert record.reuse is not None
        assert record.reuse.reused > 0
