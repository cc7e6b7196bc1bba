"""Tiny random models and tokenizers, made on the spot so that no test needs the network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

END = "<|end|>"


def byte_alphabet() -> list[str]:
    """The 256 characters byte-level tokenizers write bytes as, in a fixed order."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def save_tiny_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer without merges: ids 0..255 are bytes, 256 ends the text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {character: index for index, character in enumerate(byte_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(folder)


def tiny_llama_config(**overrides: Any) -> Any:
    """Two layers, four query heads, two key/value heads."""
    from transformers import LlamaConfig

    settings: dict[str, Any] = {
        "vocab_size": 257,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "bos_token_id": 256,
        "eos_token_id": 256,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**{**settings, **overrides})


def save_tiny_llama(folder: Path, *, dtype: str = "float32", **overrides: Any) -> Any:
    """Save a random Llama and its tokenizer in ``folder``; the model, for comparison."""
    import torch
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_llama_config(**overrides)).to(getattr(torch, dtype)).eval()
    model.save_pretrained(folder)
    save_tiny_tokenizer(folder)
    return model
