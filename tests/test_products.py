"""One row times a matrix, each way: the same numbers, the same weights, chosen once and undone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_model
from oracle import full_logits, largest_difference, new_cache
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from kvgen.cache.adapter import TransformersCache
from kvgen.engine.forward import Forward
from kvgen.measure.verdict import largest_logit, tolerance
from kvgen.models import products
from kvgen.models.products import BLOCKS, GEMV, WHOLE, OneRowProducts, choose_products

FLOAT32 = 1e-4
TYPES = ("llama", "mistral", "gemma2", "gpt_oss")  # full, sliding, soft cap, sinks


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Toys are worth a choice, the machine is idle, and every choice falls to blocks."""
    monkeypatch.setattr(products, "_LEAST_BYTES", 0)
    monkeypatch.setattr(products, "_TIMED_BYTES", 1)
    monkeypatch.setattr(products, "is_busy", lambda: False)
    monkeypatch.setattr(products, "_GAIN", float("inf"))
    monkeypatch.setattr(products, "_uses_onednn", lambda: False)


class Net(nn.Module):
    """Layers of three shapes, one with a bias."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide = nn.Linear(24, 40, bias=False, dtype=dtype)
        self.biased = nn.Linear(24, 6, dtype=dtype)
        self.odd = nn.Linear(24, 7, bias=False, dtype=dtype)
        self.device = torch.device("cpu")


@pytest.mark.parametrize("way", [BLOCKS, GEMV])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(24,), (1, 24), (1, 1, 24), (2, 3, 24)])
@torch.inference_mode()
def test_each_way_gives_the_products_of_the_library(
    shape: tuple[int, ...], dtype: torch.dtype, way: str
) -> None:
    net, rows = Net(dtype), torch.randn(shape, generator=torch.Generator().manual_seed(1))
    rows = rows.to(dtype)
    wanted = [layer(rows) for layer in (net.wide, net.biased, net.odd)]
    with OneRowProducts(net, dict.fromkeys(choose_products(net, None), way)):
        found = [layer(rows) for layer in (net.wide, net.biased, net.odd)]
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.shape == theirs.shape
        assert torch.allclose(ours, theirs, rtol=1e-5 if dtype == torch.float32 else 0.02)


@torch.inference_mode()
def test_gemv_leaves_onednn_as_it_was_even_when_a_product_fails() -> None:
    net, before = Net(torch.bfloat16), torch._C._get_mkldnn_enabled()
    within: list[bool] = []
    net.wide.register_forward_hook(lambda *_: within.append(torch._C._get_mkldnn_enabled()))
    with OneRowProducts(net, dict.fromkeys(choose_products(net, None), GEMV)):
        net.wide(torch.ones(1, 24, dtype=torch.bfloat16))
        with pytest.raises(RuntimeError):
            net.wide(torch.ones(1, 24, dtype=torch.float32))
    assert within == [before]
    assert torch._C._get_mkldnn_enabled() == before


def test_gemv_is_tried_where_onednn_would_take_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were each faster than the one before: the library's, blocks, gemv."""
    monkeypatch.setattr(products, "_uses_onednn", lambda: True)
    monkeypatch.setattr(
        products, "_times", lambda row, *ways: [len(ways) - i for i in range(len(ways))]
    )
    assert set(choose_products(Net(torch.bfloat16), None).values()) == {GEMV}
    assert set(choose_products(Net(), None).values()) == {BLOCKS}


def test_outside_its_block_the_model_is_untouched() -> None:
    net = Net()
    before = {name: value.data_ptr() for name, value in net.named_parameters()}
    with OneRowProducts(net, choose_products(net, None)):
        assert "forward" in vars(net.wide)
    assert "forward" not in vars(net.wide)
    assert {name: value.data_ptr() for name, value in net.named_parameters()} == before


@pytest.mark.newest
@pytest.mark.parametrize("way", [BLOCKS, GEMV])
@pytest.mark.parametrize("model_type", TYPES)
def test_a_model_predicts_the_same_each_way(model_type: str, way: str) -> None:
    model = tiny_model(model_type).to(torch.bfloat16 if way == GEMV else torch.float32)
    chosen = dict.fromkeys(choose_products(model, None), way)
    assert chosen
    ids = torch.randint(5, 120, (24,), generator=torch.Generator().manual_seed(1)).tolist()
    forward, cache = Forward(model, products=chosen), TransformersCache(new_cache(model))
    found = [forward.cached(ids[:3], cache), *(forward.cached([i], cache) for i in ids[3:])]
    wanted = full_logits(model, ids)[2:].float()
    limit = tolerance("bfloat16", largest_logit(wanted)) if way == GEMV else FLOAT32
    assert largest_difference(torch.stack(found).float(), wanted) < limit


class Made(TorchDispatchMode):
    """The most bytes that an operation within it gave in memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.data_ptr() for t in args if isinstance(t, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.data_ptr() not in given:
            self.most = max(self.most, result.nbytes)
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tuning_copies_no_weight(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_uses_onednn", lambda: True)
    net = Net(dtype)
    with Made() as made, OneRowProducts(net, choose_products(net, None)):
        net.wide(torch.ones(1, 24, dtype=dtype))
    assert 0 < made.most <= net.wide.out_features * dtype.itemsize
    with made:
        net.wide.weight.clone()
    assert made.most == net.wide.weight.nbytes


def test_weights_tied_to_the_embedding_stay_tied() -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    forward = Forward(model, products=choose_products(model, None))
    forward.cached([5], TransformersCache(new_cache(model)))
    assert model.lm_head.weight is model.get_input_embeddings().weight


def test_a_choice_is_made_once_and_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = choose_products(Net(), tmp_path / "new")
    monkeypatch.setattr(products, "_fastest", lambda layers: pytest.fail("timed again"))
    assert choose_products(Net(), tmp_path / "new") == first
    assert first == {"40x24 float32": BLOCKS, "6x24 float32": BLOCKS}


def test_a_choice_made_on_a_busy_machine_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "is_busy", lambda: True)
    assert choose_products(Net(), tmp_path)["40x24 float32"] == BLOCKS
    assert list(tmp_path.iterdir()) == []


def test_another_number_of_threads_is_timed_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_products(Net(), tmp_path)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(products, "_fastest", lambda layers: WHOLE)
    assert choose_products(Net(), tmp_path)["40x24 float32"] == WHOLE
    assert len(json.loads((tmp_path / "products.json").read_text())) == 2


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"a": 1}', b"\xff\xfe"])
def test_a_damaged_memory_is_timed_anew_and_replaced(tmp_path: Path, content: str | bytes) -> None:
    data = content if isinstance(content, bytes) else content.encode()
    (tmp_path / "products.json").write_bytes(data)
    assert choose_products(Net(), tmp_path)["40x24 float32"] == BLOCKS
    assert json.loads((tmp_path / "products.json").read_text())


def test_a_folder_that_cannot_be_written_only_costs_the_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert choose_products(Net(), tmp_path / "file" / "below")["40x24 float32"] == BLOCKS
