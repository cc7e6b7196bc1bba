"""Streaming text: pieces join to the one-shot text; stop strings are found and never shown."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import byte_alphabet

from kvgen.engine.text import IncrementalText, StopStrings


@cache
def byte_level() -> Any:
    """Every id is one byte; 256 is a special token."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {character: index for index, character in enumerate(byte_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


@cache
def sentencepiece() -> Any:
    """Words that carry their leading space, single characters, and bytes to fall back on."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "▁", "▁world", "▁Hello", "a", "b", "é", "▁▁", "\ufffd", "\n"]
    vocabulary = {word: index for index, word in enumerate(words)}
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(words) + byte
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def stream(tokenizer: Any, prompt: list[int], ids: list[int]) -> list[str]:
    text = IncrementalText(tokenizer, prompt)
    return [*[text.push(i) for i in ids], text.flush()]


def one_shot(tokenizer: Any, prompt: list[int], ids: list[int]) -> str:
    before = tokenizer.decode(prompt, skip_special_tokens=True)
    return str(tokenizer.decode(prompt + ids, skip_special_tokens=True)[len(before) :])


def byte_ids(text: str) -> list[int]:
    from tokenizers.pre_tokenizers import ByteLevel

    characters = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]
    return [byte_level().convert_tokens_to_ids(c) for c in characters]


@settings(max_examples=200, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 256), max_size=8),
    ids=st.lists(st.integers(0, 256), max_size=40),
)
def test_byte_level_pieces_join_to_the_one_shot_text(prompt: list[int], ids: list[int]) -> None:
    # The prompt ends with a whole character, as text does.
    prompt = [*prompt, *byte_ids("x")]
    assert "".join(stream(byte_level(), prompt, ids)) == one_shot(byte_level(), prompt, ids)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 266), max_size=30), with_prompt=st.booleans())
def test_sentencepiece_pieces_join_to_the_one_shot_text(ids: list[int], with_prompt: bool) -> None:
    prompt = [3, 2] if with_prompt else []
    assert "".join(stream(sentencepiece(), prompt, ids)) == one_shot(sentencepiece(), prompt, ids)


@pytest.mark.parametrize("text", ["héllo", "日本語", "👩‍👩‍👧 family", "a\ufffdb", "🏳️‍🌈", " lead"])
def test_no_piece_ever_shows_half_a_character(text: str) -> None:
    pieces = stream(byte_level(), byte_ids("x"), byte_ids(text))
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_an_unfinished_character_is_flushed_at_the_end() -> None:
    ids = byte_ids("é")[:1]
    assert stream(byte_level(), byte_ids("x"), ids) == ["", "\ufffd"]


def stopped(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    finder = StopStrings(stops)
    shown = ""
    for piece in pieces:
        shown += finder.push(piece)
        if finder.found is not None:
            return shown, finder.found
    return shown + finder.flush(), finder.found


@given(
    text=st.text("ab\n", max_size=20),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 20), max_size=8),
)
def test_a_stop_string_is_found_at_every_split_and_never_shown(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[a:b] for a, b in pairwise(edges)]
    shown, found = stopped(stops, pieces)
    hits = [text.find(stop) for stop in stops if stop in text]
    if found is None:
        assert not hits
        assert shown == text
    else:
        assert text.startswith(shown + found)
        assert not any(stop in shown for stop in stops)


def test_text_that_begins_a_stop_string_is_held_until_it_cannot_be_one() -> None:
    finder = StopStrings(["\n\n"])
    assert finder.push("one\n") == "one"
    assert finder.push("two") == "\ntwo"
    assert finder.push("\n") == ""
    assert finder.push("\nthree") == ""
    assert finder.found == "\n\n"


@settings(max_examples=150, deadline=None)
@given(
    text=st.lists(
        st.sampled_from(["a", "b", " ", "é", "👩‍👩‍👧", "\ufffd", "\n"]), min_size=1, max_size=9
    ),
    stop=st.lists(
        st.sampled_from(["a", "b", "é", "👧", "\u200d", "\ufffd"]), min_size=1, max_size=3
    ),
)
def test_a_stop_string_is_found_across_tokens_and_characters(
    text: list[str], stop: list[str]
) -> None:
    """Whole: ids to text, and text to what is shown, as a generation does it."""
    whole, ending = "".join(text), "".join(stop)
    shown, found = stopped([ending], stream(byte_level(), byte_ids("x"), byte_ids(whole)))
    assert (found == ending) == (ending in whole)
    assert shown == whole.partition(ending)[0]


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, 266), max_size=20), stop=st.sampled_from([" world", "é", "a"]))
def test_a_stop_string_is_found_in_what_sentencepiece_writes(ids: list[int], stop: str) -> None:
    pieces = stream(sentencepiece(), [3, 2], ids)
    whole = "".join(pieces)
    shown, found = stopped([stop], pieces)
    assert (found == stop) == (stop in whole)
    assert shown == whole.partition(stop)[0]
