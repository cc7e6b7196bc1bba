"""Model folders that are damaged or contradict themselves: configuration, weights, tokenizer."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from malformed import DROP, INDEX, WEIGHTS, Case, changed, model_case

_CONFIG, _TOKENIZER = "config.json", "tokenizer.json"


def _field(name: str, value: Any, says: str) -> Case:
    return model_case(
        f"config with {name} {json.dumps(value)}",
        lambda folder: changed(folder / _CONFIG, **{name: value}),
        says,
    )


def _text(file: str, content: str | bytes, says: str, line: str = "") -> Case:
    data = content.encode() if isinstance(content, str) else content
    more = {"line": line} if line else {}
    damage = lambda folder: (folder / file).write_bytes(data)  # noqa: E731
    return model_case(f"{file} of {content[:24]!r}", damage, says, **more)


CONFIGS = [
    *(_field("hidden_size", value, "hidden_size") for value in (0, -32, "many", None, [2])),
    _field("hidden_size", 33, "hidden size"),
    _field("hidden_size", DROP, "wrong shape"),
    *(_field("num_hidden_layers", value, "num_hidden_layers") for value in (0, -1, 1.5, 10**9)),
    _field("num_hidden_layers", 1, "config.json has fewer layers"),
    _field("num_hidden_layers", 3, "lacks model.layers.2."),
    *(_field("num_attention_heads", value, "num_attention_heads") for value in (0, "4")),
    *(_field("num_attention_heads", value, "number of attention heads") for value in (3, 5)),
    *(_field("num_key_value_heads", value, "num_key_value_heads") for value in (0, -2)),
    *(_field("num_key_value_heads", value, "wrong shape") for value in (1, 3, 8, None)),
    *(_field("head_dim", value, "head_dim") for value in (0, -8, 7, "x")),
    *(_field("vocab_size", value, "vocab_size") for value in (0, -1)),
    *(_field("vocab_size", value, "wrong shape") for value in (100, 300)),
    _field("intermediate_size", 50, "wrong shape for model.layers.0.mlp"),
    _field("max_position_embeddings", "long", "max_position_embeddings"),
    _field("rms_norm_eps", "tiny", "rms_norm_eps"),
    _field("hidden_act", "relux", "relux"),
    _field("dtype", "float7", "float7"),
    *(_field("eos_token_id", value, "eos_token_id") for value in ("end", [256, "x"], {"a": 1})),
    *(_field("model_type", value, "names no model_type") for value in (3, "", None, DROP)),
    _field("model_type", "brandnew", "does not know the model type 'brandnew'"),
    _field("model_type", "bert", "lacks bert."),
    _field("model_type", "t5", "not a causal language model"),
    _field("is_encoder_decoder", True, "not a causal language model"),
    _field("rope_parameters", {"rope_type": "spiral", "rope_theta": 1e4}, "spiral"),
    _field("rope_parameters", {"rope_type": "linear", "rope_theta": 1e4}, "factor"),
    _field("layer_types", ["full_attention"], "layer_types"),
    _field("layer_types", ["full_attention", "windy"], "layer_types"),
    _field("sliding_window", 0, "sliding_window"),
    _field("tie_word_embeddings", "yes", "tie_word_embeddings"),
    _field("attention_bias", True, "lacks model.layers.0.self_attn"),
    _field("quantization_config", 7, "config.json"),
    *(_text(_CONFIG, text, "config.json") for text in ("", "{", "[1]", "null", "\x00")),
    _text(_CONFIG, "[" * 100_000, "config.json"),
    _text(_CONFIG, b"\xff\xfe{\x00}\x00", "config.json"),
    model_case("no config.json", lambda folder: (folder / _CONFIG).unlink(), "no config.json"),
    _text("generation_config.json", "[]", "cannot load the model"),
    _text("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id"),
]


def _tensors(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    return damage


_UP = "model.layers.1.mlp.up_proj.weight"


def _cast(dtype: str) -> Callable[[dict[str, Any]], object]:
    import torch

    return lambda tensors: tensors.update({_UP: tensors[_UP].to(getattr(torch, dtype))})


def _fill(name: str, value: str) -> Callable[[dict[str, Any]], object]:
    return lambda tensors: tensors[name][0].fill_(float(value))


def _one_more_layer(tensors: dict[str, Any]) -> None:
    last = [key for key in tensors if ".1." in key]
    tensors.update({key.replace(".1.", ".2."): tensors[key].clone() for key in last})


def _index(content: str, keep: bool = False) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        if keep:
            (folder / WEIGHTS).rename(folder / "a.safetensors")
        else:
            (folder / WEIGHTS).unlink()
        (folder / INDEX).write_text(content, "utf-8")

    return damage


def _linked(folder: Path) -> None:
    outside = folder.parent / "elsewhere.safetensors"
    (folder / WEIGHTS).rename(outside)
    (folder / "a.safetensors").symlink_to(outside)
    (folder / INDEX).write_text('{"metadata": {}, "weight_map": {"a": "a.safetensors"}}', "utf-8")


def _cut(keep: int) -> Callable[[Path], object]:
    return lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:keep])


def _header(text: bytes) -> Case:
    return _text(WEIGHTS, struct.pack("<Q", len(text)) + text + bytes(4), "")._replace(
        name=f"weights with the header {text!r}"
    )


_ENTRY = b'{"a":{"dtype":"%s","shape":[%s],"data_offsets":[%s]}}'
_EVERY = ("compare -r 1 -n 2 --prompt-tokens 4 -q", "explain x -n 2 -q", "verify --quick -q")
_NOT_FINITE = "not finite numbers, at step 0, first in"

SHARDS = [
    *(_index(text) for text in ("", "{", "[]", '{"weight_map": null}', '{"weight_map": {}}')),
    *(
        _index(json.dumps({"weight_map": {"a": shard}}))
        for shard in (
            *("../x.safetensors", "/etc/x.safetensors", "C:\\x.safetensors", 3, "", None, ["b"]),
            *("m.bin", "m-1.safetensors", "x\x00.safetensors", "x" * 300 + ".safetensors"),
        )
    ),
]

WEIGHTS_CASES = [
    model_case("a tensor is missing", _tensors(lambda t: t.pop(_UP)), f"lacks {_UP}"),
    model_case("every tensor is missing", _tensors(lambda t: t.clear()), "lacks lm_head.weight"),
    model_case("a whole layer too many", _tensors(_one_more_layer), "config.json has fewer layers"),
    model_case(
        "a transposed tensor",
        _tensors(lambda t: t.update({_UP: t[_UP].T.contiguous()})),
        "wrong shape",
    ),
    *(
        model_case(f"a weight stored as {dtype}", _tensors(_cast(dtype)), "whole numbers")
        for dtype in ("int64", "int8", "uint8", "bool", "complex64")
    ),
    model_case("NaN in a layer", _tensors(_fill(_UP, "nan")), f"{_NOT_FINITE} layer 1"),
    model_case(
        "infinity in the output",
        _tensors(_fill("lm_head.weight", "inf")),
        f"{_NOT_FINITE} the output layer",
    ),
    *(
        model_case(
            f"NaN, {line.split()[0]}", _tensors(_fill(_UP, "nan")), _NOT_FINITE, f"{line} -m $F"
        )
        for line in _EVERY
    ),
    *(model_case(f"weights cut at {keep}", _cut(keep), WEIGHTS) for keep in (0, 4, 8, 100, -1)),
    *(
        _header(text)
        for text in (
            *(b"[]", b"{", b"{}", b'{"a": 1}', b"\xff\xfe"),
            *(_ENTRY % parts for parts in ((b"F32", b"1", b"-4,0"), (b"F32", b"2", b"0,4"))),
            *(_ENTRY % parts for parts in ((b"F99", b"1", b"0,4"), (b"F32", b"-1", b"0,4"))),
        )
    ),
    _text(WEIGHTS, "version https://git-lfs.github.com/spec/v1\noid sha256:0\n", WEIGHTS),
    _text(WEIGHTS, b"\x80\x04cos\nsystem\n.", WEIGHTS),
    *(
        model_case(
            f"only {name}",
            lambda folder, name=name: (folder / WEIGHTS).rename(folder / name),
            says,
        )
        for name, says in (
            ("pytorch_model.bin", "refuses"),
            ("consolidated.00.pth", "refuses"),
            ("model.pt", "refuses"),
            ("weights.pkl", "refuses"),
            ("tf_model.h5", "no weights"),
            ("other.safetensors", "found only other.safetensors"),
        )
    ),
    *(model_case(f"weight index {n}", lay, INDEX) for n, lay in enumerate(SHARDS)),
    model_case("an index that leads out by a link", _linked, "link that leads outside"),
    model_case(
        "an index without what belongs to one",
        _index('{"weight_map": {"a": "a.safetensors"}}', keep=True),
        "no 'metadata'",
    ),
]


def _tokenizer(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        content = json.loads((folder / _TOKENIZER).read_text("utf-8"))
        change(content)
        (folder / _TOKENIZER).write_text(json.dumps(content), "utf-8")

    return damage


_SETTINGS, _CHAT = "tokenizer_config.json", "generate x -q --chat -m $F"

TOKENIZERS = [
    model_case("no tokenizer", lambda folder: (folder / _TOKENIZER).unlink(), "no tokenizer"),
    *(_text(_TOKENIZER, text, "tokenizer") for text in ("", "{", "{}", "[]", "null", "\x00")),
    model_case(
        "ids beyond the embedding",
        _tokenizer(lambda t: t["model"]["vocab"].update(x=5000)),
        "id 5000 and the model knows 257",
    ),
    model_case(
        "an empty vocabulary", _tokenizer(lambda t: t["model"].update(vocab={})), "no tokens"
    )._replace(code=4),
    model_case(
        "a negative id", _tokenizer(lambda t: t["model"]["vocab"].update(x=-3)), "cannot read"
    ),
    model_case(
        "a merge of nothing known",
        _tokenizer(lambda t: t["model"].update(merges=[["q", "zz"]])),
        "cannot read the tokenizer",
    ),
    model_case(
        "an unknown kind of tokenizer", _tokenizer(lambda t: t["model"].update(type="N")), "read"
    ),
    *(_text(_SETTINGS, text, "tokenizer") for text in ("", "{", "[]", '{"eos_token": 5}')),
    _text(_SETTINGS, '{"model_max_length": "x"}', "tokenizer fails on the prompt"),
    _text(_SETTINGS, '{"auto_map": {"AutoTokenizer": ["x.Y", null]}}', "--trust-remote-code"),
    *(
        _text(_SETTINGS, text, "chat template refuses", _CHAT)._replace(code=2)
        for text in ('{"chat_template": "{% if %}"}', '{"chat_template": 5}')
    ),
]
