"""A conversation on one cache answers as if every turn were computed from nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from chatty import (
    END,
    FIRST,
    LETTERS,
    PAIRS,
    START,
    ChatLetters,
    counting,
    fresh,
    say,
    talk_of,
    trimming,
)
from hypothesis import given
from hypothesis import strategies as st

from kvgen.cache.disk import CacheFileError
from kvgen.cache.reuse import ONE_TOKEN
from kvgen.engine import conversation
from kvgen.engine.conversation import ChatOptions, Conversation
from kvgen.engine.conversation_file import ConversationFiles
from kvgen.engine.sampling import SamplingOptions
from kvgen.engine.splice import splice
from kvgen.errors import InputError, UsageError
from kvgen.models import LoadedModel

# Full, sliding, both, latent, recurrent (one that starts over at a second piece), hybrid.
TYPES = ("llama", "mistral", "gemma3_text", "deepseek_v3", "mamba2", "mamba", "qwen3_next")
TRIMMED = ("llama", "deepseek_v3")
OPENING = "<|im_start|>s\nBe good.<|im_end|>\n<|im_start|>u\n"
SYSTEM_TOKENS = len(ChatLetters()(OPENING)["input_ids"])
QUESTIONS = ("Who?", "And then?", "Why so?")


@pytest.mark.parametrize("model_type", TYPES)
def test_every_turn_equals_a_fresh_run_over_the_same_ids(model_type: str) -> None:
    talk = talk_of(model_type)
    before = 0
    for question in QUESTIONS:
        said = say(talk, question)
        assert said.new_ids == fresh(talk, said)
        assert (said.receipt.reused, said.why) == (before, None)
        # The id that ends an answer is not forwarded, nor is the last of one that is cut.
        before = len(talk.ids) - (said.new_ids[-1] != END)


@pytest.mark.parametrize("model_type", TYPES)
def test_another_question_after_undo_equals_never_having_asked(model_type: str) -> None:
    talk, other = talk_of(model_type), talk_of(model_type)
    for one in (talk, other):
        say(one, "Who?")
    say(talk, "And a long question, longer than any window?")
    undone = talk.undo()
    assert undone is not None
    assert (undone.refusal is None) == (model_type in TRIMMED)
    assert undone.wanted - undone.held <= 1  # a copy was kept where the layers cannot go back
    assert talk.ids == other.ids
    found, wanted = say(talk, "Why so?"), say(other, "Why so?")
    assert found.ids == wanted.ids
    assert found.new_ids == wanted.new_ids == fresh(talk, found)


def test_undo_of_the_first_turn_keeps_the_system_message() -> None:
    talk = talk_of("llama", system="Be good.")
    first = say(talk, "Who?")
    undone = talk.undo()
    assert undone is not None
    assert (talk.turns, talk.ids) == ([], [])
    assert undone.held == undone.wanted == SYSTEM_TOKENS
    assert say(talk, "Who?").new_ids == first.new_ids
    talk.undo()
    assert talk.undo() is None


def test_without_room_for_copies_undo_says_what_is_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(conversation, "_SNAPSHOT_BYTES", 0)
    talk = talk_of("mamba2")
    for question in QUESTIONS[:2]:
        say(talk, question)
    undone = talk.undo()
    assert undone is not None
    assert undone.held == 0
    assert undone.wanted > 0
    assert "sums up every token" in (undone.refusal or "")
    said = say(talk, "Why so?")
    assert said.receipt.reused == 0
    assert said.new_ids == fresh(talk, said)


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen3_next"])
def test_a_template_that_changes_earlier_turns_is_said_to(model_type: str) -> None:
    talk = talk_of(model_type, trimming)
    first = say(talk, "Who?")
    second = say(talk, "And then?")
    kept = len(first.ids) + 1 + (first.new_ids[0] < PAIRS)
    assert second.why is not None
    assert second.why.endswith(f"from token {kept + 1} on")
    assert second.receipt.matched == kept
    assert second.receipt.reused == (kept if model_type == "llama" else 0)
    assert (second.receipt.why_fewer is None) == (model_type == "llama")
    assert second.new_ids == fresh(talk, second)
    third = say(talk, "Why so?")
    # Where layers cannot go back, the copy from before the second turn is of no use either.
    assert third.new_ids == fresh(talk, third)


def test_a_template_that_changes_its_beginning_leaves_nothing_to_reuse() -> None:
    talk = talk_of("llama", counting)
    say(talk, "Who?")
    second = say(talk, "And then?")
    assert second.receipt.reused == 0
    assert second.new_ids == fresh(talk, second)


def test_a_question_asked_again_word_for_word_forwards_one_token() -> None:
    talk = talk_of("llama")
    plan = talk.plan("Who?")
    reply = talk.reply(plan)
    reply.step()
    talk.keep(plan, reply)
    talk.turns, talk.ids = [], []
    again = say(talk, "Who?")
    assert again.receipt.why_fewer == ONE_TOKEN
    assert again.receipt.computed == 1
    assert again.new_ids == fresh(talk, again)


@pytest.mark.parametrize("model_type", ["llama", "mamba2"])
def test_a_prompt_that_was_stopped_midway_changes_nothing(model_type: str) -> None:
    talk, other = talk_of(model_type, prefill_chunk=3), talk_of(model_type)
    for one in (talk, other):
        say(one, "Who?")
    plan = talk.plan("A question that takes several pieces")
    reply = talk.reply(plan)
    pieces = reply.prefill()
    assert next(pieces) > 3
    talk.keep(plan, reply)
    assert talk.cache.position == len(talk.held)
    assert len(talk.turns) == 1
    found, wanted = say(talk, "Why so?"), say(other, "Why so?")
    assert found.new_ids == wanted.new_ids
    assert found.receipt.computed <= wanted.receipt.computed


def test_an_answer_left_off_is_kept_as_far_as_it_came() -> None:
    talk = talk_of("llama")
    plan = talk.plan("Who?")
    reply = talk.reply(plan)
    shown = reply.step() + reply.step() + reply.leave_off()
    talk.keep(plan, reply)
    assert talk.turns[0].answer == shown == ChatLetters().decode(reply.ids)
    said = say(talk, "Why so?")
    assert said.ids[: len(plan.ids) + 2] == plan.ids + reply.ids
    assert said.new_ids == fresh(talk, said)


def test_after_a_forward_that_broke_off_all_is_computed_again() -> None:
    talk, other = talk_of("llama"), talk_of("llama")
    for one in (talk, other):
        say(one, "Who?")
    with torch.inference_mode():
        pairs = talk.cache.layers[0].pairs
        pairs.update(*pairs.views)  # type: ignore[union-attr]
    talk.empty_cache()
    found = say(talk, "Why so?")
    assert found.receipt.reused == 0
    assert found.new_ids == say(other, "Why so?").new_ids


# Ids


@given(
    text=st.text(LETTERS[-8:] + "abcd", max_size=12),
    other=st.text("abcd", max_size=4),
    cuts=st.lists(st.booleans(), min_size=40, max_size=40),
)
def test_what_reads_the_same_keeps_the_ids_it_was_generated_in(
    text: str, other: str, cuts: list[bool]
) -> None:
    tokenizer = ChatLetters()
    rendered = tokenizer(text + other)["input_ids"]
    held: list[int] = []
    rest, choices = text, iter(cuts)
    while rest:
        pair = rest[:2] in ("ab", "cd") and next(choices)
        number = {"ab": PAIRS + 1 - PAIRS % 2, "cd": PAIRS + PAIRS % 2}[rest[:2]] if pair else None
        held.append(number or FIRST + LETTERS.index(rest[0]))
        rest = rest[2 if pair else 1 :]
    found = splice(tokenizer, held, rendered)
    assert found[: len(held)] == held
    assert tokenizer.decode(found) == text + other


def test_a_special_token_is_only_ever_itself() -> None:
    class Spelling(ChatLetters):
        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": [FIRST + LETTERS.index(letter) for letter in text]}

    spelled = Spelling()("a<|im_end|>b")["input_ids"]
    meant = ChatLetters()("a<|im_end|>b")["input_ids"]
    assert splice(ChatLetters(), meant, spelled) == spelled
    assert splice(ChatLetters(), spelled, meant) == meant
    assert START not in spelled


class Halves:
    """Every id is one byte of UTF-8."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return bytes(ids).decode("utf-8", "replace")

    def convert_ids_to_tokens(self, ids: int) -> str:
        return str(ids)


def test_half_a_character_is_never_taken_for_another() -> None:
    euro, cent = list("€".encode()), list("¢".encode())
    assert splice(Halves(), euro[:1], cent) == cent
    assert splice(Halves(), cent[:1], [*cent, *b"x"]) == [*cent, *b"x"]
    lost = list("\ufffd".encode())
    assert splice(Halves(), [*b"a", *euro[:2]], [*b"a", *lost, *b"b"]) == [*b"a", *euro[:2], *b"b"]
    assert splice(Halves(), [*b"a", *euro], [*b"a", *euro, *b"b"]) == [*b"a", *euro, *b"b"]
    assert splice(Halves(), [0x80, *b"x"], [*"\ufffd".encode(), *b"xy"]) == [0x80, *b"xy"]


def test_a_stop_string_ends_the_answer_and_is_not_said_later() -> None:
    talk = talk_of("llama", max_new_tokens=30)
    text = say(talk, "Who?").text
    stop = text[10:12]
    talk = talk_of("llama", max_new_tokens=30, stop=(stop,))
    said = say(talk, "Who?")
    assert said.text == text[: text.index(stop)]
    again = say(talk, "Why so?")
    assert again.new_ids == fresh(talk, again)
    assert ChatLetters().decode(again.ids).startswith(ChatLetters().decode(said.ids) + said.text)
    assert f"{said.text}<|im_end|>" in ChatLetters().decode(again.ids)


def test_the_same_seed_gives_the_same_answers_also_after_undo() -> None:
    sampling = SamplingOptions(temperature=1.0, seed=3)
    talk, other = (talk_of("llama", sampling=sampling) for _ in range(2))
    first = say(talk, "Who?")
    say(talk, "And?")
    talk.undo()
    assert say(other, "Who?").new_ids == first.new_ids
    assert say(talk, "Why so?").new_ids == say(other, "Why so?").new_ids


# A full context


def test_a_full_context_is_refused_with_the_three_numbers() -> None:
    talk = talk_of("llama", limit=60)
    say(talk, "Who?")
    ids, cached = talk.ids, talk.cache.position
    with pytest.raises(InputError, match=r"has \d+ tokens, 6 more .* holds 60;.*drop-oldest"):
        say(talk, "A question that is too long to fit")
    assert (talk.ids, talk.cache.position) == (ids, cached)
    say(talk, "Why?")


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_the_oldest_turns_make_room_and_the_system_message_stays(model_type: str) -> None:
    options = {"limit": 70, "overflow": "drop-oldest", "system": "Be good."}
    talk = talk_of(model_type, **options)
    for question in ("One?", "Two?", "Three?"):
        plan = talk.plan(question)
        if plan.dropped_turns:
            break
        say(talk, question)
    assert plan.dropped_turns == 1
    text = ChatLetters().decode(plan.ids)
    assert text.startswith(OPENING + "Two?")
    kept = talk.turns[0]
    assert (len(talk.turns), kept.question) == (1, "Two?")
    assert talk.ids[-len(kept.answer_ids) :] == kept.answer_ids
    assert plan.receipt.matched == SYSTEM_TOKENS
    assert plan.receipt.reused == (SYSTEM_TOKENS if model_type == "llama" else 0)
    said = say(talk, "Three?")
    assert said.new_ids == fresh(talk, said)
    with pytest.raises(InputError, match="the context is full"):
        say(talk, "?" * 100)
    assert len(talk.turns) == 2


def test_an_answer_ends_where_the_context_does() -> None:
    talk = talk_of("llama", limit=20, max_new_tokens=None)
    plan = talk.plan("Who?")
    assert plan.new_tokens == 20 - len(plan.ids)


# Refusals


def test_what_cannot_be_a_conversation_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match="no chat template"):
        talk_of("llama", None)
    with pytest.raises(UsageError, match="leave out --prefill-chunk"):
        talk_of("mamba", prefill_chunk=2)
    with pytest.raises(InputError, match="empty"):
        say(talk_of("llama"), "")


# Files


@pytest.mark.parametrize("model_type", TYPES)
def test_a_loaded_conversation_goes_on_as_the_saved_one(model_type: str, tmp_path: Path) -> None:
    talk = talk_of(model_type, system="Be good.")
    for question in QUESTIONS[:2]:
        say(talk, question)
    file = tmp_path / "talk"
    assert ConversationFiles(talk).save(file) == file.stat().st_size
    other = talk_of(model_type)
    say(other, "Something else")
    ConversationFiles(other).load(file)
    assert (other.ids, other.held, other.system) == (talk.ids, talk.held, "Be good.")
    found, wanted = say(other, "Why so?"), say(talk, "Why so?")
    assert (found.ids, found.new_ids) == (wanted.ids, wanted.new_ids)
    assert found.receipt.reused == wanted.receipt.reused
    other.undo()
    other.undo()
    said = say(other, "Why so?")
    assert said.new_ids == fresh(other, said)


def test_a_file_of_another_model_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    talk, other = talk_of("llama"), talk_of("mistral")
    for one in (talk, other):
        say(one, "Who?")
    file = tmp_path / "talk"
    ConversationFiles(talk).save(file)
    content, ids = file.read_bytes(), other.ids
    with pytest.raises(CacheFileError, match="tiny-llama with another model configuration"):
        ConversationFiles(other).load(file)
    with pytest.raises(CacheFileError, match="tiny-llama"):
        ConversationFiles(other).save(file)
    assert (file.read_bytes(), other.ids) == (content, ids)


def test_a_file_that_is_no_conversation_is_not_overwritten(tmp_path: Path) -> None:
    talk = talk_of("llama")
    say(talk, "Who?")
    file = tmp_path / "notes.txt"
    file.write_text("mine", "utf-8")
    for use in (ConversationFiles(talk).save, ConversationFiles(talk).load):
        with pytest.raises(CacheFileError, match="no cache file of kvgen"):
            use(file)
    assert file.read_text("utf-8") == "mine"


@pytest.mark.real
def test_smollm_answers_as_without_a_cache(smollm: LoadedModel) -> None:
    talk = Conversation(smollm, ChatOptions(max_new_tokens=10, system="You are brief."))
    before = 0
    for question in ("Name two colours.", "Say “naïve café” 🙂", "Why?"):
        said = say(talk, question)
        assert said.new_ids == fresh(talk, said)
        assert said.receipt.reused == before
        before = talk.cache.position
    talk.undo()
    assert say(talk, "Why?").new_ids == said.new_ids
