"""Measured turns of a conversation: each with its receipt and its times.

Text comes out piece by piece; who shows it, and how, is the caller's business.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Literal

from kvgen.engine.conversation import Conversation, Plan
from kvgen.engine.reply import Reply
from kvgen.measure.clock import Clock, DeviceClock
from kvgen.measure.guard import Demand, check_before_growing
from kvgen.measure.records import Reuse
from kvgen.measure.warmup import warm_up


@dataclass
class TurnRecord:
    """One turn, whole or as far as it came. Seconds are ``*_s``, bytes are ``*_bytes``."""

    index: int
    """Answered turns of this run before it, those taken back included."""
    question: str
    reuse: Reuse
    dropped_turns: int = 0
    """Oldest turns left out because the context was full."""
    answer: str = ""
    answer_ids: list[int] = field(default_factory=list)
    """As generated, without the id that ended the answer."""
    new_tokens: int = 0
    """Tokens generated, that id included."""
    ending: Literal["end", "stop", "length", "interrupted"] = "interrupted"
    context_tokens: int = 0
    """Tokens of the conversation with this turn."""
    context_limit: int | None = None
    cached_tokens: int = 0
    kv_bytes_used: int = 0
    kv_bytes_allocated: int = 0
    tokenize_s: float = 0.0
    """The template, its tokens, and finding what of them is cached."""
    prefill_s: float = 0.0
    """The tokens that were not reused, and the choice of the first new one."""
    decode_s: float = 0.0
    """All later steps together."""

    @property
    def ttft_s(self) -> float:
        """From the question to the first token."""
        return self.tokenize_s + self.prefill_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; absent below two tokens."""
        return self.decode_s / (self.new_tokens - 1) if self.new_tokens > 1 else None


@dataclass
class Tally:
    """Sums over the answered turns of one run."""

    turns: int = 0
    submitted: int = 0
    reused: int = 0
    computed: int = 0
    new_tokens: int = 0
    saved_s: float = 0.0


class MeasuredConversation:
    """Asks a conversation its questions and keeps the record of the turn in progress."""

    def __init__(self, conversation: Conversation, clock: Clock | None = None) -> None:
        """Runs both shapes once, so that the first turn is timed as the others are."""
        self.conversation = conversation
        self.tally = Tally()
        self.record: TurnRecord | None = None
        """Of the last turn that was begun."""
        self._clock = clock or DeviceClock(conversation.loaded.device)
        self._s_per_token: float | None = None
        ids = conversation.first_prompt("Hello")
        warm_up(conversation.loaded, conversation.forward, ids, conversation.new_cache())

    def ask(self, question: str, stopping: Callable[[], bool]) -> Generator[str, None, None]:
        """Answer; yields after every step the text that may now be shown, which may be empty.

        ``stopping`` is asked between tokens and between pieces of the prompt. Raises
        ``InputError`` for a question that does not fit; the conversation is then as it was. An
        exception in a step, Ctrl-C included, takes the turn back and empties the cache, whose
        layers may have come to different positions. Whoever stops iterating closes the iterator.
        """
        talk = self.conversation
        begin = self._clock.now()
        plan = talk.plan(question)
        self._check_memory(plan)
        reply = talk.reply(plan)
        record = TurnRecord(
            self.tally.turns,
            question,
            Reuse.of(plan.receipt, plan.why_no_further),
            plan.dropped_turns,
        )
        record.tokenize_s = self._clock.now() - begin
        self.record = record
        try:
            yield from self._pieces(record, reply, stopping)
        except BaseException:
            talk.empty_cache()
            raise
        talk.keep(plan, reply)
        self._finish(record, reply)

    def _pieces(
        self, record: TurnRecord, reply: Reply, stopping: Callable[[], bool]
    ) -> Iterator[str]:
        for _ in self._timed_prefill(record, reply):
            if stopping():
                return
        while reply.ending is None:
            if stopping():
                yield reply.leave_off()
                return
            begin = self._clock.now()
            piece = reply.step()
            took = self._clock.now() - begin
            if len(reply.new_ids) == 1:
                record.prefill_s += took
            else:
                record.decode_s += took
            yield piece

    def _timed_prefill(self, record: TurnRecord, reply: Reply) -> Iterator[int]:
        begin = self._clock.now()
        for pending in reply.prefill():
            record.prefill_s += self._clock.now() - begin
            yield pending
            begin = self._clock.now()

    def _finish(self, record: TurnRecord, reply: Reply) -> None:
        talk = self.conversation
        record.answer, record.answer_ids = reply.text, reply.ids
        record.new_tokens, record.ending = len(reply.new_ids), reply.ending or "interrupted"
        record.context_tokens, record.context_limit = len(talk.ids), talk.loaded.context_limit
        record.cached_tokens = talk.cache.position
        record.kv_bytes_used = talk.cache.bytes_used
        record.kv_bytes_allocated = talk.cache.bytes_allocated
        if record.new_tokens:
            self._count(record)

    def _count(self, record: TurnRecord) -> None:
        reuse, tally = record.reuse, self.tally
        # The fastest prefill of this run: long prompts take less time per token.
        took = record.prefill_s / reuse.computed
        self._s_per_token = min(took, self._s_per_token or took)
        reuse.saved_s = self._s_per_token * reuse.reused if reuse.reused else None
        tally.turns += 1
        tally.submitted += reuse.submitted
        tally.reused += reuse.reused
        tally.computed += reuse.computed
        tally.new_tokens += record.new_tokens
        tally.saved_s += reuse.saved_s or 0.0

    def _check_memory(self, plan: Plan) -> None:
        """What the turn adds to the cache, against what is free. Raises ``InputError``."""
        talk = self.conversation
        if talk.options.force:
            return
        more = plan.receipt.computed + plan.new_tokens - 1
        demand = Demand(more, talk.cache.policy, min(plan.receipt.computed, 512))
        check_before_growing(talk.loaded, talk.cache.specs, demand)
