"""Folders load completely or fail in one clear line; dtype, device and stop ids are as promised."""

from __future__ import annotations

import json
import logging
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import save_tiny_llama, save_tiny_tokenizer

from kvgen.errors import InputError, ModelError, UsageError
from kvgen.models import LoadOptions, load_model

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save_tiny_llama(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path, saved: Path) -> Path:
    """A tiny model's folder, the test's own to damage."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def load(folder: Path, **options: Any) -> Any:
    return load_model(LoadOptions(str(folder), device="cpu", **options))


def refusal(folder: Path, **options: Any) -> str:
    """The one line that loading the folder fails with."""
    with pytest.raises(ModelError) as caught:
        load(folder, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    return message


def edit_json(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text())
    content.update(changes)
    file.write_text(json.dumps({key: value for key, value in content.items() if value != "DROP"}))


def test_a_folder_loads_ready_to_run(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    loaded = load(folder)
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert (loaded.dtype, loaded.device) == (torch.float32, torch.device("cpu"))
    assert (loaded.context_limit, loaded.stop_ids) == (128, {256})
    assert (loaded.source.kind, loaded.convert_s) == ("folder", 0)
    assert loaded.load_s > 0
    assert loaded.tokenizer_s > 0
    assert capfd.readouterr() == ("", "")


def test_loading_leaves_the_libraries_logging_alone(folder: Path) -> None:
    import huggingface_hub.utils as hub
    from transformers.utils import logging as transformers_logging

    def settings() -> tuple[Any, ...]:
        return (
            transformers_logging.get_verbosity(),
            transformers_logging.is_progress_bar_enabled(),
            hub.are_progress_bars_disabled(),
            logging.getLogger("huggingface_hub").level,
        )

    before = settings()
    load(folder)
    assert settings() == before


@pytest.mark.parametrize(
    ("checkpoint", "asked", "expected"),
    [
        ("float32", "auto", torch.float32),
        ("bfloat16", "auto", torch.bfloat16),
        ("float16", "auto", torch.float32),  # half arithmetic is slow on a CPU
        ("float16", "float16", torch.float16),
        ("float32", "bfloat16", torch.bfloat16),
    ],
)
def test_dtype(tmp_path: Path, checkpoint: str, asked: str, expected: torch.dtype) -> None:
    save_tiny_llama(tmp_path / "m", dtype=checkpoint)
    loaded = load(tmp_path / "m", dtype=asked)
    assert loaded.dtype == expected
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {expected}


def test_dtype_comes_from_the_weights_when_the_config_is_silent(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path / "m", dtype="bfloat16")
    edit_json(tmp_path / "m" / "config.json", dtype="DROP", torch_dtype="DROP")
    assert load(tmp_path / "m").dtype == torch.bfloat16


def test_an_unknown_dtype_is_a_usage_error(folder: Path) -> None:
    with pytest.raises(UsageError, match="float32, bfloat16, float16"):
        load(folder, dtype="int4")


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "cpu:1", ""])
def test_an_unknown_device_is_a_usage_error(folder: Path, device: str) -> None:
    with pytest.raises(UsageError, match="choose auto, cpu"):
        load_model(LoadOptions(str(folder), device=device))


def test_an_absent_device_is_a_usage_error_that_lists_what_is_there(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"not available here; available: .*cpu"):
        load_model(LoadOptions(str(folder), device="cuda:99"))


def test_auto_prefers_cuda_then_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvgen.models.device import choose_device

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert choose_device("auto").type == "cpu"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose_device("auto").type == "mps"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto").type == "cuda"
    assert choose_device("cuda:1").index == 1


def test_stop_ids_are_the_union_of_all_three_places(folder: Path) -> None:
    edit_json(folder / "config.json", eos_token_id=[3, 5])
    edit_json(folder / "generation_config.json", eos_token_id=[7])
    assert load(folder).stop_ids == {3, 5, 7, 256}


def test_no_stop_id_anywhere_is_an_empty_set(folder: Path) -> None:
    edit_json(folder / "config.json", eos_token_id=None)
    edit_json(folder / "generation_config.json", eos_token_id=None)
    edit_json(folder / "tokenizer_config.json", eos_token=None)
    assert load(folder).stop_ids == frozenset()


def test_a_model_without_positions_has_no_limit(tmp_path: Path) -> None:
    from transformers import BloomConfig, BloomForCausalLM

    config = BloomConfig(vocab_size=257, hidden_size=16, n_layer=1, n_head=2)
    BloomForCausalLM(config).save_pretrained(tmp_path)
    save_tiny_tokenizer(tmp_path)
    assert load(tmp_path).context_limit is None


def test_gpt2_names_its_limit_differently(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=257, n_positions=48, n_embd=16, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    save_tiny_tokenizer(tmp_path)
    assert load(tmp_path).context_limit == 48


def test_shards_load(folder: Path) -> None:
    whole = load(folder).model
    shutil.rmtree(folder)
    whole.save_pretrained(folder, max_shard_size="20KB")
    save_tiny_tokenizer(folder)
    assert len(list(folder.glob("*.safetensors"))) > 1
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(load(folder).model(ids).logits, whole(ids).logits)


def test_a_folder_without_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert "no config.json" in refusal(folder)


def test_a_folder_with_only_a_gguf_file_points_at_it(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "m.gguf").write_bytes(b"GGUF")
    assert ".gguf" in refusal(folder)


@pytest.mark.parametrize("content", ["{", "", "[1]", "\x00", "[" * 100_000])
def test_a_corrupt_config(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    assert "config.json" in refusal(folder)


def test_a_config_in_another_encoding(folder: Path) -> None:
    (folder / "config.json").write_bytes(b"\xff\xfe{\x00}\x00")
    assert "config.json" in refusal(folder)


def test_a_config_without_model_type(folder: Path) -> None:
    edit_json(folder / "config.json", model_type="DROP")
    assert "model_type" in refusal(folder)


@pytest.mark.parametrize("value", ["many", -1, 0, None, [2]])
def test_a_config_with_nonsense_in_it(folder: Path, value: Any) -> None:
    edit_json(folder / "config.json", hidden_size=value)
    refusal(folder)


def test_an_unknown_model_type_names_the_transformers_version(folder: Path) -> None:
    import transformers

    edit_json(folder / "config.json", model_type="brandnew")
    message = refusal(folder)
    assert "brandnew" in message
    assert transformers.__version__ in message


def test_a_folder_without_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    assert WEIGHTS in refusal(folder)


@pytest.mark.parametrize("pickle", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickled_weights_are_named_and_refused(folder: Path, pickle: str) -> None:
    (folder / WEIGHTS).unlink()
    (folder / pickle).write_bytes(b"cos\nsystem\n")
    message = refusal(folder)
    assert pickle in message
    assert "save_pretrained" in message


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1, -5000])
def test_truncated_weights(folder: Path, keep: int) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:keep])
    assert WEIGHTS in refusal(folder)


@pytest.mark.parametrize(
    "header", [b"[]", b"{", b'{"a": 1}', b'{"a": {"dtype": "F32", "data_offsets": ["x", []]}}']
)
def test_weights_with_a_broken_header(folder: Path, header: bytes) -> None:
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header)
    assert WEIGHTS in refusal(folder)


def test_weights_that_are_something_else(folder: Path) -> None:
    (folder / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert WEIGHTS in refusal(folder)


@pytest.mark.parametrize(
    "shard",
    ["../model.safetensors", "/etc/x.safetensors", "C:\\x.safetensors", "..\\x", 3, "", None],
)
def test_an_index_that_points_outside(folder: Path, shard: Any) -> None:
    (folder / WEIGHTS).rename(folder.parent / WEIGHTS)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": shard}}))
    assert "outside the model folder" in refusal(folder)


def test_an_index_that_names_a_pickle(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "pytorch_model.bin"}}))
    assert "not safetensors" in refusal(folder)


@pytest.mark.parametrize("weight_map", [None, [], {}, [["unhashable"]]])
def test_an_index_without_a_map(folder: Path, weight_map: Any) -> None:
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert "weight_map" in refusal(folder)


def test_an_index_with_a_list_for_a_shard(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": ["b"]}}))
    assert "outside" in refusal(folder)


def test_a_missing_shard_is_named(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    assert "model-1.safetensors" in refusal(folder)


def test_missing_weights_are_never_random_numbers(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    assert "lacks model.layers.1.mlp.up_proj.weight" in refusal(folder)


def test_many_missing_weights_name_three(folder: Path) -> None:
    edit_json(folder / "config.json", num_hidden_layers=4)
    message = refusal(folder)
    assert message.count("model.layers.") == 3
    assert "more" in message


def test_weights_of_the_wrong_shape(folder: Path) -> None:
    edit_json(folder / "config.json", intermediate_size=50)
    assert "wrong shape for model.layers.0.mlp" in refusal(folder)


def test_an_encoder_is_refused(folder: Path) -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=257,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    BertModel(config).save_pretrained(folder)
    assert "not a causal language model" in refusal(folder)


def test_an_encoder_decoder_is_refused(folder: Path) -> None:
    edit_json(folder / "config.json", model_type="t5", architectures=["T5Model"])
    assert "T5Model is not a causal language model" in refusal(folder)


def test_a_missing_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    assert "no tokenizer" in refusal(folder)


@pytest.mark.parametrize("content", ["{", "{}", "[]", ""])
def test_a_corrupt_tokenizer(folder: Path, content: str) -> None:
    (folder / "tokenizer.json").write_text(content)
    assert "tokenizer" in refusal(folder)


def with_own_code(folder: Path) -> None:
    """Make the folder bring its own model class, which leaves a mark when it is run."""
    edit_json(
        folder / "config.json",
        model_type="homemade",
        auto_map={
            "AutoConfig": "homemade.HomemadeConfig",
            "AutoModelForCausalLM": "homemade.HomemadeModel",
        },
    )
    (folder / "homemade.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        f"open({str(folder / 'was-run')!r}, 'w').close()\n"
        "class HomemadeConfig(LlamaConfig):\n    model_type = 'homemade'\n"
        "class HomemadeModel(LlamaForCausalLM):\n    config_class = HomemadeConfig\n"
    )


def test_a_models_own_code_does_not_run_unasked(folder: Path) -> None:
    with_own_code(folder)
    assert "--trust-remote-code" in refusal(folder)
    assert not (folder / "was-run").exists()


def test_trusted_code_runs_with_a_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import transformers.dynamic_module_utils as modules

    monkeypatch.setattr(modules, "HF_MODULES_CACHE", str(folder.parent / "modules"))
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    with_own_code(folder)
    with caplog.at_level(logging.WARNING, "kvgen"):
        loaded = load(folder, trust_remote_code=True)
    assert type(loaded.model).__name__ == "HomemadeModel"
    assert str(folder) in caplog.text


def test_running_out_of_memory_is_an_input_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    def exhausted(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9e12")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", exhausted)
    with pytest.raises(InputError, match="not enough memory"):
        load(folder)
