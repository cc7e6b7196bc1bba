"""One row times a matrix in blocks: the same numbers, the same weights, chosen once and undone."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from families import tiny_model
from oracle import full_logits, largest_difference, new_cache
from torch import nn

from kvgen.cache.adapter import TransformersCache
from kvgen.engine.forward import Forward
from kvgen.measure.roofline import WeightReads
from kvgen.measure.verdict import largest_logit, tolerance
from kvgen.models import packed, products
from kvgen.models.products import BLOCKS, PACKED, WHOLE, OneRowProducts, choose_products

FLOAT32 = 1e-4
TYPES = ("llama", "mistral", "gemma2", "gpt_oss")  # full, sliding, soft cap, sinks


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Toys are worth a choice, the machine is idle, and every choice falls to blocks, for nothing
    can be packed.
    """
    monkeypatch.setattr(products, "_LEAST_BYTES", 0)
    monkeypatch.setattr(products, "_TIMED_BYTES", 1)
    monkeypatch.setattr(products, "is_busy", lambda: False)
    monkeypatch.setattr(products, "_GAIN", float("inf"))
    monkeypatch.setattr(packed, "can_pack", lambda layer: False)


class Net(nn.Module):
    """Layers of three shapes, one with a bias."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide = nn.Linear(24, 40, bias=False, dtype=dtype)
        self.biased = nn.Linear(24, 6, dtype=dtype)
        self.odd = nn.Linear(24, 7, bias=False, dtype=dtype)
        self.device = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(24,), (1, 24), (1, 1, 24), (2, 3, 24)])
@torch.inference_mode()
def test_blocks_give_the_products_of_the_library(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    net, rows = Net(dtype), torch.randn(shape, generator=torch.Generator().manual_seed(1))
    rows = rows.to(dtype)
    wanted = [layer(rows) for layer in (net.wide, net.biased, net.odd)]
    with OneRowProducts(net, choose_products(net, None)):
        found = [layer(rows) for layer in (net.wide, net.biased, net.odd)]
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.shape == theirs.shape
        assert torch.allclose(ours, theirs, rtol=0.02 if dtype == torch.bfloat16 else 1e-5)


def test_outside_its_block_the_model_is_untouched() -> None:
    net = Net()
    before = {name: value.data_ptr() for name, value in net.named_parameters()}
    with OneRowProducts(net, choose_products(net, None)):
        assert "forward" in vars(net.wide)
    assert "forward" not in vars(net.wide)
    assert {name: value.data_ptr() for name, value in net.named_parameters()} == before


@pytest.mark.newest
@pytest.mark.parametrize("model_type", TYPES)
def test_a_model_predicts_the_same_in_blocks(model_type: str) -> None:
    model = tiny_model(model_type)
    chosen = choose_products(model, None)
    assert set(chosen.values()) == {BLOCKS}
    ids = torch.randint(5, 120, (24,), generator=torch.Generator().manual_seed(1)).tolist()
    forward, cache = Forward(model, products=chosen), TransformersCache(new_cache(model))
    found = [forward.cached(ids[:3], cache), *(forward.cached([i], cache) for i in ids[3:])]
    assert largest_difference(torch.stack(found), full_logits(model, ids)[2:]) < FLOAT32


def test_weights_tied_to_the_embedding_stay_tied() -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    forward = Forward(model, products=choose_products(model, None))
    forward.cached([5], TransformersCache(new_cache(model)))
    assert model.lm_head.weight is model.get_input_embeddings().weight


def test_a_choice_is_made_once_and_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = choose_products(Net(), tmp_path / "new")
    monkeypatch.setattr(products, "_fastest", lambda layers, alone: pytest.fail("timed again"))
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
    monkeypatch.setattr(products, "_fastest", lambda layers, alone: WHOLE)
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


TENSORS = (torch.Tensor, nn.Parameter)
PACKABLE = packed.can_pack(nn.Linear(64, 64, dtype=torch.bfloat16))
packs = pytest.mark.skipif(not PACKABLE, reason="torch packs no bfloat16 weights on this processor")


@pytest.fixture
def packing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever can be packed is."""
    monkeypatch.setattr(packed, "can_pack", lambda layer: layer.weight.dtype == torch.bfloat16)


@packs
@pytest.mark.parametrize("shape", [(24,), (1, 24), (1, 1, 24), (2, 3, 24)])
@torch.inference_mode()
def test_a_packed_weight_is_the_same_weight_and_gives_its_products(shape: tuple[int, ...]) -> None:
    layer = nn.Linear(24, 40, dtype=torch.bfloat16).requires_grad_(False)
    weight = layer.weight.clone()
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    wanted = layer(rows)
    packed.pack(layer)
    assert torch.equal(layer.weight, weight)
    assert layer(rows).shape == wanted.shape
    assert torch.allclose(layer(rows), wanted, rtol=0.02, atol=0.02)
    assert list(packed.weights(layer)) == ["bias", "packed"]
    packed.unpack(layer)
    assert type(layer) is nn.Linear
    assert torch.equal(layer.weight, weight)


@packs
@pytest.mark.usefixtures("packing")
def test_tied_weights_and_those_that_other_code_reads_are_not_packed() -> None:
    model = tiny_model("llama", tie_word_embeddings=True).to(torch.bfloat16)
    choose_products(model, None)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert type(model.model.layers[0].mlp.up_proj) is packed.PackedLinear


@packs
@pytest.mark.usefixtures("packing")
@pytest.mark.newest
@pytest.mark.parametrize("model_type", TYPES)
def test_a_packed_model_predicts_the_same_and_counts_the_same_bytes(model_type: str) -> None:
    model = tiny_model(model_type).to(torch.bfloat16)
    ids = torch.randint(5, 120, (24,), generator=torch.Generator().manual_seed(1)).tolist()
    wanted, reads = full_logits(model, ids), WeightReads(model)
    chosen = choose_products(model, None)
    assert PACKED in chosen.values()
    forward, cache = Forward(model, products=chosen), TransformersCache(new_cache(model))
    found = [forward.cached(ids[:3], cache), *(forward.cached([i], cache) for i in ids[3:])]
    limit = tolerance("bfloat16", largest_logit(wanted))
    assert largest_difference(torch.stack(found).float(), wanted[2:].float()) < limit
    assert WeightReads(model).total == reads.total
    assert WeightReads(model).per_forward(1) == reads.per_forward(1)


@packs
@pytest.mark.usefixtures("packing")
def test_packing_never_holds_more_than_one_weight_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted on the tensors themselves, whenever a weight has just been packed or unpacked."""
    model = tiny_model("llama").to(torch.bfloat16).requires_grad_(False)
    largest = max(weight.nbytes for weight in model.parameters())
    limit = WeightReads(model).total + largest
    most = 0

    def counting(turn: Callable[[nn.Linear], None]) -> Callable[[nn.Linear], None]:
        def turned(layer: nn.Linear) -> None:
            nonlocal most
            turn(layer)
            gc.collect()
            alive = {
                id(t) if t.is_mkldnn else t.untyped_storage().data_ptr(): t.numel() * t.itemsize
                for t in gc.get_objects()
                if type(t) in TENSORS and id(t) not in before
            }
            most = max(most, sum(alive.values()))

        return turned

    kept = {id(weight) for weight in packed.weights(model).values()}
    before = {id(t) for t in gc.get_objects() if type(t) in TENSORS} - kept
    monkeypatch.setattr(packed, "pack", counting(packed.pack))
    monkeypatch.setattr(packed, "unpack", counting(packed.unpack))
    choose_products(model, None)
    assert 0 < most <= limit
