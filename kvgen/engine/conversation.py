"""A conversation on one cache: each turn forwards only what the cache does not hold yet.

What was said is kept twice: as text, which the model's chat template renders anew for every turn,
and as the ids that were forwarded and generated, which are never tokenized again (see
``splice``). Knows nothing of time or of who prints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from kvgen.cache.adapter import continues_prefill, policy_for, specs_for
from kvgen.cache.manager import KVCache
from kvgen.cache.policies import DEFAULT
from kvgen.cache.reuse import ONE_TOKEN, Receipt, cannot_serve, goes_back
from kvgen.cache.trie import common_prefix
from kvgen.engine.answer import Answer
from kvgen.engine.decoder import Decoder
from kvgen.engine.forward import Forward, check_piece
from kvgen.engine.prompt import check_known, check_text, encode_chat, messages_for
from kvgen.engine.reply import Reply
from kvgen.engine.sampling import Sampler, SamplingOptions
from kvgen.engine.splice import splice
from kvgen.errors import InputError
from kvgen.models import LoadedModel

DEFAULT_NEW_TOKENS = 512
# Tokens of one forward, so that a long prompt can be interrupted between two.
_PIECE = 512
# What snapshots for going back may hold together; the oldest go first.
_SNAPSHOT_BYTES = 512 * 1024 * 1024


@dataclass(frozen=True)
class ChatOptions:
    """How a conversation is held."""

    system: str | None = None
    max_new_tokens: int | None = None
    """Of one answer; ``DEFAULT_NEW_TOKENS``, or as many as fit, if not given."""
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    stop: tuple[str, ...] = ()
    cache: str = DEFAULT
    prefill_chunk: int | None = None
    overflow: Literal["stop", "drop-oldest"] = "stop"
    """What happens when the context is full."""
    parse_special: bool = False
    """Whether special tokens that a message spells out are meant; else they are text."""
    force: bool = False
    """Go on where memory is predicted not to suffice."""


@dataclass(frozen=True)
class Snapshot:
    """A copy of the cache, and the ids it holds."""

    ids: list[int]
    cache: KVCache


@dataclass
class Turn:
    """A question and its answer, as text and as the ids that were generated."""

    question: str
    answer: str
    answer_ids: list[int]
    snapshot: Snapshot | None = None
    """Before this turn, where its tokens cannot be taken back from the cache."""


@dataclass(frozen=True)
class Plan:
    """What the next turn forwards: its prompt, how it is served, and the room for its answer."""

    question: str
    ids: list[int]
    receipt: Receipt
    why_no_further: str | None
    """What ended the match before the end of what was said so far."""
    new_tokens: int
    dropped_turns: int
    """Oldest turns that were left out because the context was full."""
    snapshot: Snapshot | None


@dataclass(frozen=True)
class Undone:
    """A turn taken back: the tokens that the cache holds now, of those it should hold."""

    turn: Turn
    held: int
    wanted: int
    refusal: str | None
    """Why the cache could not simply be trimmed."""


class Conversation:
    """Turns, their ids and the cache that holds the longest possible beginning of them."""

    def __init__(self, loaded: LoadedModel, options: ChatOptions) -> None:
        """Raises ``UsageError`` for options that do not suit the model, one without a chat
        template included.
        """
        self.loaded, self.options = loaded, options
        self.system = options.system
        self.forward = Forward(loaded.model, loaded.attention, loaded.products)
        self._specs = specs_for(loaded.model)
        self._policy = policy_for(loaded.model, options.cache)
        self._chunk = options.prefill_chunk
        check_piece(loaded.model, self._specs, self._chunk)
        if self._chunk is None and continues_prefill(loaded.model, self._specs):
            self._chunk = _PIECE
        self.cache = self.new_cache()
        self.turns: list[Turn] = []
        self.ids: list[int] = []
        """Of all turns, as they were forwarded and generated."""
        self.held: list[int] = []
        """Ids that the cache holds: a beginning of some prompt, and ``cache.position`` many."""
        self._opening = self._shared_by_first_prompts()

    def new_cache(self) -> KVCache:
        """An empty cache for this model."""
        return self._policy.make(self._specs)

    def first_prompt(self, question: str) -> list[int]:
        """The ids of a conversation that begins with ``question``."""
        return self._prompt((), (), question)

    def plan(self, question: str) -> Plan:
        """Make the cache ready for the next turn, which changes no turn before it.

        Raises ``InputError`` for an empty question and for one that the context has no room for,
        ``UsageError`` where the template refuses the conversation.
        """
        check_text(question)
        turns = self.turns
        ids = self._prompt(turns, self.ids, question)
        limit, wanted = self.loaded.context_limit, self.options.max_new_tokens
        room = None if limit is None else limit - len(ids)
        if limit is not None and room is not None and room < (wanted or 1):
            full = len(ids)
            if self.options.overflow == "drop-oldest":
                # A good part of the context is freed, so that this is not paid at every turn.
                spare = max(wanted or 1, limit // 4)
                while turns and limit - len(ids) < spare:
                    turns = turns[1:]
                    ids = self._prompt(turns, self._ids_of(turns), question)
                room = limit - len(ids)
            if room < (wanted or 1):
                raise InputError(self._full_text(full, wanted or 1, limit))
        check_known(ids, self.loaded.vocabulary)
        dropped = len(self.turns) - len(turns)
        if dropped:
            self.turns, self.ids = turns, self._ids_of(turns)
        receipt, why = self._take_up(ids)
        least = DEFAULT_NEW_TOKENS if room is None else min(DEFAULT_NEW_TOKENS, room)
        new = wanted or least
        snapshot = self._snapshot(len(ids) + new)
        return Plan(question, ids, receipt, why, new, dropped, snapshot)

    def reply(self, plan: Plan) -> Reply:
        """The answer to what was planned, ready to be stepped through, then to be kept."""
        sampling = self.options.sampling
        if sampling.seed is not None:
            # Of its own at every turn, so that a turn taken back leaves no trace.
            seed = (sampling.seed + len(self.turns)) % 2**63
            sampling = replace(sampling, seed=seed)
        decoder = Decoder(self.forward, plan.ids, Sampler(sampling), self.cache, self._chunk)
        loaded = self.loaded
        answer = Answer(
            loaded.tokenizer, plan.ids, plan.new_tokens, loaded.stop_ids, self.options.stop
        )
        return Reply(decoder, answer)

    def keep(self, plan: Plan, reply: Reply) -> None:
        """Take what was forwarded into account, and the turn, if it has come to an answer."""
        self.held = reply.forwarded
        if reply.new_ids:
            self.turns.append(Turn(plan.question, reply.text, reply.ids, plan.snapshot))
            self.ids = [*plan.ids, *reply.ids]
            self._forget_old_snapshots()
        elif plan.snapshot is not None:
            self.cache, self.held = plan.snapshot.cache, plan.snapshot.ids

    def undo(self) -> Undone | None:
        """Take the last turn back, and the cache with it; ``None`` if there is no turn."""
        if not self.turns:
            return None
        turn = self.turns.pop()
        self.ids = self._ids_of(self.turns)
        before = self.ids or self._opening
        wanted = common_prefix(self.held, before)
        refusal = self._go_back(before, [*self.turns, turn])
        return Undone(turn, self.cache.position, wanted, refusal)

    def replace(
        self, system: str | None, turns: list[Turn], cache: KVCache, held: list[int]
    ) -> None:
        """Go on with another conversation of this model; ``cache`` holds the ids ``held``."""
        before = self.system
        self.system = system
        try:
            ids, opening = self._ids_of(turns), self._shared_by_first_prompts()
        except BaseException:
            self.system = before
            raise
        self.turns, self.ids, self._opening = turns, ids, opening
        self.cache, self.held = cache, held

    def reset(self) -> None:
        """Forget all turns; of the cache, what every first prompt begins with stays."""
        self.turns, self.ids = [], []
        self._go_back(self._opening, ())

    def empty_cache(self) -> None:
        """Have everything computed again: after a forward that was broken off midway."""
        self.cache.reset()
        self.held = []

    def _prompt(self, turns: Sequence[Turn], ids: Sequence[int], question: str) -> list[int]:
        """The ids of a question after ``turns``, whose own are ``ids``."""
        messages = messages_for(question, self.system)
        for turn in turns:
            # Before the question, which stays the last.
            messages[-1:-1] = [
                {"role": "user", "content": turn.question},
                {"role": "assistant", "content": turn.answer},
            ]
        tokenizer = self.loaded.tokenizer
        return splice(tokenizer, ids, encode_chat(tokenizer, messages, self.options.parse_special))

    def _ids_of(self, turns: Sequence[Turn]) -> list[int]:
        """The ids of ``turns``, from their beginning."""
        ids: list[int] = []
        for index, turn in enumerate(turns):
            ids = self._prompt(turns[:index], ids, turn.question) + turn.answer_ids
        return ids

    def _shared_by_first_prompts(self) -> list[int]:
        """What any first prompt begins with: the template's opening and the system message."""
        one, other = self.first_prompt("a"), self.first_prompt("1")
        return one[: common_prefix(one, other)]

    def _take_up(self, prompt: list[int]) -> tuple[Receipt, str | None]:
        """Have the cache hold as much of what ``prompt`` begins with as it can.

        Also returns why it does not begin with all that was said so far.
        """
        before = self.ids or self._opening
        kept = common_prefix(before, prompt)
        changed = kept < min(len(before), len(self.held))
        matched = common_prefix(self.held, prompt)
        refusal = self._go_back(prompt[:-1], self.turns)
        reused = self.cache.position
        if refusal is None and reused < matched:
            refusal = ONE_TOKEN
        receipt = Receipt(len(prompt), max(matched, reused), reused, refusal)
        why = f"the template rendered earlier turns differently from token {kept + 1:,} on"
        return receipt, why if changed else None

    def _go_back(self, ids: Sequence[int], turns: Sequence[Turn]) -> str | None:
        """Have the cache hold the longest possible beginning of ``ids``, and nothing else.

        Where it cannot be trimmed to that, which the returned refusal says, the best snapshot
        among ``turns`` serves, or the cache is emptied.
        """
        tokens = common_prefix(self.held, ids)
        refusal = cannot_serve(self.cache, tokens) if tokens else None
        snapshots = [turn.snapshot for turn in turns if turn.snapshot is not None]
        serving = [one for one in snapshots if list(ids[: len(one.ids)]) == one.ids]
        best = max(serving, key=lambda one: len(one.ids), default=None)
        if best is not None and (refusal is not None or len(best.ids) > tokens):
            self.cache, self.held = best.cache.fork(), best.ids
        elif tokens and refusal is None:
            self.cache.trim(self.cache.position - tokens)
            self.held = self.held[:tokens]
        else:
            self.empty_cache()
        return refusal

    def _snapshot(self, tokens: int) -> Snapshot | None:
        """A copy of the cache where, after ``tokens`` tokens, it could not go back to it."""
        if not self.held or goes_back(self.cache, tokens):
            return None
        return Snapshot(self.held, self.cache.fork())

    def _forget_old_snapshots(self) -> None:
        left = _SNAPSHOT_BYTES
        for turn in reversed(self.turns):
            if turn.snapshot is not None:
                left -= turn.snapshot.cache.bytes_allocated
                if left < 0:
                    turn.snapshot = None

    def _full_text(self, prompt: int, wanted: int, limit: int) -> str:
        return (
            f"the context is full: the conversation with this question has {prompt:,} tokens, "
            f"{wanted:,} more are asked for, and the model's context holds {limit:,}; ask for "
            "less, take turns back (/undo), begin anew (/reset) or start with "
            "--context-overflow drop-oldest"
        )
