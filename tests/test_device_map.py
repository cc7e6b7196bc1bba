"""Layers spread over devices: each layer's buffers lie where the layer does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import Cli

from kvgen.cache.adapter import TransformersCache, specs_for
from kvgen.cache.manager import KVCache
from kvgen.engine.forward import Forward
from kvgen.measure.facts import device_note, is_spread
from kvgen.measure.roofline import WeightReads


def test_where_there_is_one_device_it_changes_nothing(cli: Cli, tiny_folder: Path) -> None:
    pytest.importorskip("accelerate", reason="needs the extra kvgen[parallel]")
    line = ("generate", "Time", "-m", tiny_folder, "-n", "5", "-f", "json", "--ignore-eos")
    alone, spread = cli(*line), cli(*line, "--device-map", "auto")
    assert spread.returncode == 0, spread.stderr
    ids = [[s["token_id"] for s in json.loads(d.stdout)["steps"]] for d in (alone, spread)]
    assert ids[0] == ids[1]


def test_a_model_that_waits_on_disk_in_part_runs_through_the_cache(
    tiny_folder: Path, tmp_path: Path
) -> None:
    pytest.importorskip("accelerate", reason="needs the extra kvgen[parallel]")
    from transformers import AutoModelForCausalLM

    places = {"model.layers.1": "disk"}
    rest = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head")
    model = AutoModelForCausalLM.from_pretrained(
        tiny_folder, device_map=places | dict.fromkeys(rest, "cpu"), offload_folder=tmp_path
    )
    whole = AutoModelForCausalLM.from_pretrained(tiny_folder)
    assert is_spread(model)
    assert not is_spread(whole)
    assert WeightReads(model).total == WeightReads(whole).total
    cache = KVCache(specs_for(model))
    forward, adapter = Forward(model.eval()), TransformersCache(cache)
    ids = [5, 6, 7, 8]
    forward.cached(ids[:3], adapter)
    found = forward.cached(ids[3:], adapter)
    assert torch.allclose(found, Forward(whole.eval()).uncached(ids), atol=1e-4)
    assert cache.bytes_used == cache.bytes_formula(4)
    assert f"{cache.bytes_used:,} bytes of 2 on cpu" in device_note(cache)


def test_layers_on_two_cuda_devices(cli: Cli, tiny_folder: Path) -> None:
    found = torch.cuda.device_count()
    if found < 2:
        pytest.skip(f"needs 2 CUDA devices to spread layers over; {found} here")
    from transformers import AutoModelForCausalLM

    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0}
    rest = ("model.layers.1", "model.norm", "lm_head")
    model = AutoModelForCausalLM.from_pretrained(
        tiny_folder, device_map=places | dict.fromkeys(rest, 1)
    )
    cache = KVCache(specs_for(model))
    Forward(model.eval()).cached([5, 6, 7], TransformersCache(cache))
    assert [str(layer.buffers()[0].device) for layer in cache.layers] == ["cuda:0", "cuda:1"]


def test_other_devices_are_not_named_beside_it(cli: Cli, tiny_folder: Path) -> None:
    done = cli("generate", "Time", "-m", tiny_folder, "--device-map", "auto", "--device", "cpu")
    assert done.returncode == 2
    assert "--device-map auto chooses the devices itself; leave out --device cpu" in done.stderr
    both = cli("generate", "Time", "--device-map", "auto", "--parallel", "tensor")
    assert both.returncode == 2
    assert "exclude each other" in both.stderr
