"""Architecture files without weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import Cli

from kvgen.errors import KvgenError, ModelError, UsageError
from kvgen.models import LoadOptions, load_model

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 64,
    "dtype": "bfloat16",
}


def write(file: Path, **changes: object) -> LoadOptions:
    file.write_text(json.dumps(CONFIG | changes), "utf-8")
    return LoadOptions(str(file), load_format="dummy")


def test_a_file_becomes_a_model_of_that_shape(tmp_path: Path) -> None:
    loaded = load_model(write(tmp_path / "arch.json"))
    assert loaded.source.kind == "random weights"
    assert loaded.dtype == torch.bfloat16
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}
    assert (loaded.config.num_hidden_layers, loaded.context_limit) == (2, 64)
    assert not loaded.model.training
    assert loaded.tokenizer("Time")["input_ids"] == loaded.tokenizer("Time")["input_ids"]
    assert loaded.tokenizer.decode(loaded.tokenizer("Zeit fließt")["input_ids"]) == "Zeit fließt"


def test_the_random_numbers_are_the_same_every_time_and_disturb_none(tmp_path: Path) -> None:
    options = write(tmp_path / "arch.json")
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    first, second = load_model(options), load_model(options)
    assert torch.rand(1) == expected
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_folder_brings_its_own_tokenizer(tiny_folder: Path) -> None:
    loaded = load_model(LoadOptions(str(tiny_folder), load_format="dummy"))
    assert loaded.tokenizer.eos_token == "<|end|>"
    assert loaded.source.kind == "random weights"


def test_a_small_vocabulary_is_never_exceeded(tmp_path: Path) -> None:
    loaded = load_model(write(tmp_path / "arch.json", vocab_size=40))
    assert max(loaded.tokenizer("Zeit fließt ~")["input_ids"]) < 40


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (None, UsageError),
        ("{", ModelError),
        ("[]", ModelError),
        ("{}", ModelError),
        ('{"model_type": "no-such-model"}', ModelError),
        ('{"model_type": "vit"}', ModelError),
    ],
)
def test_what_is_no_architecture_is_refused(
    content: str | None, error: type[KvgenError], tmp_path: Path
) -> None:
    file = tmp_path / "arch.json"
    if content is not None:
        file.write_text(content, "utf-8")
    with pytest.raises(error):
        load_model(LoadOptions(str(file), load_format="dummy"))


def test_weights_are_never_random_unless_asked_for(tmp_path: Path) -> None:
    write(tmp_path / "config.json")
    with pytest.raises(ModelError, match="no weights"):
        load_model(LoadOptions(str(tmp_path)))


def test_generate_labels_random_weights(cli: Cli, tmp_path: Path) -> None:
    options = write(tmp_path / "arch.json")
    base = ("generate", "Time", "-m", str(options.model), "--load-format", "dummy", "-n", "3")
    assert "random weights" in cli(*base).stderr
    document = json.loads(cli(*base, "-f", "json").stdout)
    assert document["model"]["source"] == "random weights"
    assert any("random weights" in note for note in document["notes"])
