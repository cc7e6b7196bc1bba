"""Rebuilds a GGUF file's byte-level BPE tokenizer. Heavy imports inside the functions.

transformers has a reader of its own, but before 5.24 it gives the tokenizer of some Llama files a
wrong end-of-text token, a BOS they do not want and extra tokens. The commonest kinds are therefore
built here, the same on every release; the others are left to transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# How llama.cpp's names split text before BPE. Digits: SmolLM cuts them singly, Qwen2 too, Llama 3
# in threes; the GPT-2 pattern is built into the tokenizers library.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS = {
    "llama-bpe": rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}",
    "qwen2": rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}",
}
_KINDS = ("gpt-2", "smollm", *_PATTERNS)
_CONTROL, _USER_DEFINED = 3, 4  # GGUF token types that are matched whole, before BPE


@dataclass(frozen=True)
class _Vocabulary:
    """What the file says about its tokenizer."""

    kind: str
    tokens: list[str]
    types: list[int]
    merges: list[str]
    special_ids: dict[str, int]
    add_bos: bool
    chat_template: str | None


def build_tokenizer(reader: Any) -> Any | None:
    """The tokenizer of an open GGUFReader's file, None when it is of a kind left to transformers.

    Raises ValueError when the file's tokenizer fields contradict each other.
    """
    vocabulary = _read(reader)
    if vocabulary is None:
        return None
    from transformers import PreTrainedTokenizerFast

    names = {
        role: vocabulary.tokens[index]
        for role, index in vocabulary.special_ids.items()
        if 0 <= index < len(vocabulary.tokens)
    }
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_build_backend(vocabulary, names.get("bos_token")),
        clean_up_tokenization_spaces=False,
        **names,
    )
    if vocabulary.chat_template:
        tokenizer.chat_template = vocabulary.chat_template
    return tokenizer


def _build_backend(vocabulary: _Vocabulary, bos: str | None) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, processors

    tokens = vocabulary.tokens
    merges = [merge.partition(" ") for merge in vocabulary.merges]
    if len(set(tokens)) != len(tokens) or not all(right for _, _, right in merges):
        raise ValueError("the tokenizer has doubled tokens or broken merges")
    backend = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[(left, right) for left, _, right in merges],
            ignore_merges=vocabulary.kind == "llama-bpe",
        )
    )
    backend.pre_tokenizer = _pre_tokenizer(vocabulary.kind)
    backend.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, vocabulary.types, strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            special = kind == _CONTROL
            backend.add_tokens([AddedToken(token, special=special, normalized=False)])
    if vocabulary.add_bos and bos is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, vocabulary.special_ids["bos_token"])],
        )
    return backend


def _pre_tokenizer(kind: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    if kind in _PATTERNS:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_PATTERNS[kind]), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    by_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if kind == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), by_words])
    return by_words


def _read(reader: Any) -> _Vocabulary | None:
    kind = _text(reader, "tokenizer.ggml.pre") or "gpt-2"
    if _text(reader, "tokenizer.ggml.model") != "gpt2" or kind not in _KINDS:
        return None
    tokens = _texts(reader, "tokenizer.ggml.tokens")
    types = _numbers(reader, "tokenizer.ggml.token_type") or [1] * len(tokens)
    if not tokens or len(types) != len(tokens):
        raise ValueError("the tokenizer has no tokens, or not one type for each")
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special_ids = {
        f"{role}_token": found[0]
        for role, field in roles.items()
        if (found := _numbers(reader, f"tokenizer.ggml.{field}_token_id"))
    }
    add_bos = _numbers(reader, "tokenizer.ggml.add_bos_token") or [kind == "llama-bpe"]
    return _Vocabulary(
        kind=kind,
        tokens=tokens,
        types=types,
        merges=_texts(reader, "tokenizer.ggml.merges"),
        special_ids=special_ids,
        add_bos=bool(add_bos[0]),
        chat_template=_text(reader, "tokenizer.chat_template"),
    )


def _texts(reader: Any, name: str) -> list[str]:
    field = reader.fields.get(name)
    return [bytes(field.parts[i]).decode("utf-8") for i in field.data] if field else []


def _text(reader: Any, name: str) -> str | None:
    return next(iter(_texts(reader, name)), None)


def _numbers(reader: Any, name: str) -> list[int]:
    field = reader.fields.get(name)
    return [int(field.parts[i][0]) for i in field.data] if field else []
