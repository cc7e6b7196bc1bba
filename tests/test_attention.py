"""Attention of one query: equal to the formula, equal to the model's own, and gone afterwards."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Cli
from families import WINDOW, tiny_model
from oracle import full_logits, largest_difference, new_cache
from tiny import save_tiny_tokenizer
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvgen.cache.adapter import TransformersCache
from kvgen.engine import attention
from kvgen.engine.attention import attend, one_query_attention
from kvgen.engine.forward import Forward
from kvgen.measure.verify import Verifier

FLOAT32 = 1e-4
# Full, sliding, both with grouped queries, soft cap, sinks, a bias on positions, code of its own.
TYPES = ("llama", "mistral", "gemma3_text", "gemma2", "gpt_oss", "bloom")
newest = pytest.mark.newest


def formula(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Head by head in float64, with nothing packed, shared or left out."""
    query, key, value = query.double(), key.double(), value.double()
    batch, heads = query.shape[:2]
    group = heads // key.shape[1]
    out = torch.empty(batch, 1, heads, value.shape[3], dtype=torch.double)
    for row in range(batch):
        for head in range(heads):
            scores = key[row, head // group] @ query[row, head, 0] * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if mask is not None:
                seen = mask.expand(batch, heads, 1, -1)[row, head, 0]
                hidden = torch.where(seen, 0.0, float("-inf")) if seen.dtype == torch.bool else seen
                scores = scores + hidden
            weights = scores.exp()
            total = weights.sum() + (0 if sinks is None else sinks[head].double().exp())
            out[row, 0, head] = weights / total @ value[row, head // group]
    return out


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def masks(batch: int, heads: int, keys: int) -> dict[str, Tensor | None]:
    hidden = torch.zeros(batch, 1, 1, keys)
    hidden[..., : keys // 3] = torch.finfo(torch.float32).min
    return {
        "none": None,
        "true-is-seen": hidden == 0,
        "added": hidden,
        "per-head": drawn(batch, heads, 1, keys),
    }


@pytest.mark.parametrize("mask", ["none", "true-is-seen", "added", "per-head"])
@pytest.mark.parametrize("kv_heads", [6, 2, 1])
@pytest.mark.parametrize("keys", [1, 37, 600])
def test_it_is_the_formula_for_every_mask_and_grouping(keys: int, kv_heads: int, mask: str) -> None:
    # Keys as the cache hands them out: a part of a larger buffer.
    key, value = (drawn(2, kv_heads, keys + 9 + i, 8)[:, :, 3 : keys + 3] for i in (0, 1))
    query, hidden = drawn(2, 6, 1, 8), masks(2, 6, keys)[mask]
    wanted = formula(query, key, value, hidden, 0.3)
    assert largest_difference(attend(query, key, value, hidden, 0.3), wanted) < 1e-5


@pytest.mark.parametrize("keys", [37, 600])
def test_it_is_the_formula_with_soft_cap_sinks_and_narrower_values(keys: int) -> None:
    query, key, value = drawn(2, 6, 1, 8), drawn(2, 2, keys, 8), drawn(2, 2, keys, 5)
    sinks, hidden = drawn(6), masks(2, 6, keys)["true-is-seen"]
    for softcap, heads in ((None, None), (2.0, None), (None, sinks), (2.0, sinks)):
        wanted = formula(query, key, value, hidden, 8**-0.5, softcap, heads)
        found = attend(query, key, value, hidden, None, softcap, heads)
        assert largest_difference(found, wanted) < 1e-5


@pytest.mark.parametrize("keys", [37, 600])
def test_16_bit_numbers_are_packed_and_right(keys: int) -> None:
    query, key, value = (t.bfloat16() for t in (drawn(1, 6, 1, 8), *(drawn(2, 1, 2, keys, 8))))
    wanted = formula(query, key, value, None, 8**-0.5)
    found = attend(query, key, value)
    assert found.dtype == torch.bfloat16
    assert largest_difference(found, wanted) < 0.02


@newest
@pytest.mark.parametrize("many_keys", [1, 512], ids=["products", "kernel"])
@pytest.mark.parametrize("model_type", TYPES)
def test_a_model_predicts_the_same_with_either_attention(
    model_type: str, many_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_MANY_KEYS", many_keys)
    model = tiny_model(model_type)
    ids = torch.randint(5, 120, (3 * WINDOW,), generator=torch.Generator().manual_seed(1)).tolist()
    wanted = full_logits(model, ids)
    for mode in ("auto", "model"):
        forward, cache = Forward(model, mode), TransformersCache(new_cache(model))
        found = [forward.cached(ids[:3], cache), *(forward.cached([i], cache) for i in ids[3:])]
        assert largest_difference(torch.stack(found), wanted[2:]) < FLOAT32, mode


@newest
@pytest.mark.parametrize("model_type", ["mistral", "gemma2", "gpt_oss"])
def test_every_check_holds_with_products_alone(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_MANY_KEYS", 1)
    ids = list(range(5, 5 + 3 * WINDOW))
    model = tiny_model(model_type)
    verifier = Verifier(model, ids, 4, FLOAT32, step=16, forward=Forward(model, "kvgen"))
    assert [one for one in verifier.outcomes() if one.status == "fail"] == []


def calls(forward: Forward, model: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often kvgen's attention runs in a prompt, in one token, and in an uncached token."""
    count = 0

    def counted(*args: Any) -> Tensor:
        nonlocal count
        count += 1
        return attend(*args)

    monkeypatch.setattr(attention, "attend", counted)
    cache, seen = TransformersCache(new_cache(model)), {}
    for name, run in (
        ("prompt", lambda: forward.cached([5, 6, 7], cache)),
        ("token", lambda: forward.cached([8], cache)),
        ("uncached", lambda: forward.uncached([5])),
    ):
        count = 0
        run()
        seen[name] = count
    return seen


def test_only_single_cached_tokens_attend_through_kvgen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    layers = model.config.num_hidden_layers
    ours, own = Forward(model), Forward(model, "model")
    assert calls(ours, model, monkeypatch) == {"prompt": 0, "token": layers, "uncached": 0}
    assert calls(own, model, monkeypatch) == {"prompt": 0, "token": 0, "uncached": 0}
    assert (ours.attention, own.attention) == ("kvgen, sdpa", "sdpa")


def test_the_librarys_attention_is_back_also_after_an_error() -> None:
    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    ours = one_query_attention(tiny_model("llama"), "auto")
    assert ours is not None
    with contextlib.suppress(ZeroDivisionError), ours:
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not before
        raise ZeroDivisionError
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is before
    assert "eager" not in ALL_ATTENTION_FUNCTIONS


@newest
def test_what_it_has_no_equal_of_is_left_to_the_model() -> None:
    """A bias on positions at every key: the model's attention is called, in a token too."""
    model = tiny_model("inkling_text")
    ids = list(range(5, 25))
    forward, cache = Forward(model, "kvgen"), TransformersCache(new_cache(model))
    assert forward.attention == "kvgen, sdpa"
    found = torch.stack([forward.cached([i], cache) for i in ids])
    assert largest_difference(found, full_logits(model, ids)) < FLOAT32


def test_the_record_says_what_attended(cli: Cli, tiny_folder: Path) -> None:
    for mode, name in (("auto", "kvgen, sdpa"), ("model", "sdpa"), ("kvgen", "kvgen, sdpa")):
        done = cli(
            *("generate", "Time", "-m", tiny_folder, "-n", "3", "--format", "json", "-q"),
            *("--attention", mode),
        )
        assert json.loads(done.stdout)["environment"]["attention"] == name


def test_a_model_that_attends_in_its_own_way_is_refused_by_name(
    cli: Cli, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_model("bloom").save_pretrained(tmp_path)
    save_tiny_tokenizer(tmp_path)
    capsys.readouterr()  # the library's progress bar
    done = cli("generate", "Time", "-m", tmp_path, "-n", "3", "--attention", "kvgen")
    assert done.returncode == 2
    assert "bloom computes attention in a way of its own" in done.stderr
    assert len(done.stderr.splitlines()) == 1
