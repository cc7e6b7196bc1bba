"""Published configurations: read without transformers as transformers reads them, or refused."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from families import FAMILIES, tiny_config

from kvgen.cache.raw_config import decoder_settings
from kvgen.cache.shapes import specs_from_config
from kvgen.errors import ModelError

DERIVED = ("layer_types", "layers_block_type")
# Refused from a file, with the reason: sizes made in code, or fields under names not read here.
REFUSED_AS_SAVED = {
    *("dory", "dots3_note", "dots3_note_text", "gemma4", "gemma4_text", "gemma4_unified"),
    *("gemma4_unified_text", "inkling_text", "inkling2_text", "inkling2_loop_text", "jetmoe"),
    *("longcat_flash", "recurrent_gemma", "zamba", "zamba2"),
    *("gemma4_unified_assistant", "gemma4_assistant"),
    *("prophetnet", "trocr", "xglm", "xlm"),
}


def as_published(config: Any, without: tuple[str, ...] = ()) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    return {name: value for name, value in fields.items() if name not in without}


@pytest.mark.newest
@pytest.mark.parametrize("model_type", list(FAMILIES))
def test_a_saved_configuration_is_read_as_its_class_reads_it_or_refused(model_type: str) -> None:
    try:
        config = tiny_config(model_type).get_text_config(decoder=True)
        expected = specs_from_config(config)
    except Exception as error:  # a validator
        pytest.skip(f"no specs for it at all: {str(error)[:80]}")
    if getattr(config, "encoder_layers", None):
        pytest.skip("half of an encoder-decoder, which is not published by itself")
    if model_type in REFUSED_AS_SAVED:
        with pytest.raises(ModelError):
            specs_from_config(as_published(config))
        return
    assert specs_from_config(as_published(config)) == expected


@pytest.mark.newest
@pytest.mark.parametrize("model_type", list(FAMILIES))
def test_layer_kinds_left_out_are_derived_or_missed_by_name(model_type: str) -> None:
    """As older files are: without the list of kinds, which the class derives."""
    from transformers import CONFIG_MAPPING

    try:
        decoder = tiny_config(model_type).get_text_config(decoder=True).model_type
        config = CONFIG_MAPPING[decoder]()
        expected = specs_from_config(config)
    except Exception as error:
        pytest.skip(f"its defaults are no model: {str(error)[:80]}")
    with contextlib.suppress(ModelError):
        assert specs_from_config(as_published(config, DERIVED)) == expected


def test_the_decoder_is_found_within_a_larger_model() -> None:
    inner = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    outer = {"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": inner}
    fields = decoder_settings(outer)
    assert fields["model_type"] == "gemma3_text"
    assert fields["torch_dtype"] == "bfloat16"
    assert fields["head_dim"] == 256  # what the class supplies
    assert fields["layer_types"] == ["sliding_attention"] * 2


def test_a_window_that_is_switched_off_is_none() -> None:
    base = {"model_type": "qwen2", "num_hidden_layers": 4, "sliding_window": 32}
    base |= {"max_window_layers": 2}
    assert decoder_settings(base)["layer_types"] == ["full_attention"] * 4
    on = decoder_settings(base | {"use_sliding_window": True})["layer_types"]
    assert on == ["full_attention"] * 2 + ["sliding_attention"] * 2


def test_letters_of_a_pattern_are_layer_kinds() -> None:
    base = {"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*E"}
    assert decoder_settings(base)["num_hidden_layers"] == 5
    assert decoder_settings(base)["layer_types"] == [
        "linear_attention",
        "dummy",
        "linear_attention",
        "full_attention",
        "dummy",
    ]
    with pytest.raises(ModelError, match="hybrid_override_pattern has '\\?'"):
        decoder_settings(base | {"hybrid_override_pattern": "M?"})
