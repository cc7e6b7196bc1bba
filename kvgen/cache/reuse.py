"""Taking up a stored cache for a new prompt: how much of it serves again, and why not more.

Knows the cache and token ids, nothing of models, tokenizers or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvgen.cache.manager import KVCache
from kvgen.cache.trie import common_prefix

ONE_TOKEN = "the last prompt token is always forwarded: its logits give the first new token"


@dataclass(frozen=True)
class Receipt:
    """What became of one prompt: counts of tokens, and seconds where they are known.

    ``matched`` tokens begin both the prompt and what was stored; ``reused`` of them were taken
    from there. ``why_fewer`` says why fewer were reused than matched.
    """

    submitted: int
    matched: int = 0
    reused: int = 0
    why_fewer: str | None = None
    saved_s: float | None = None
    """What forwarding the reused tokens took when they were stored."""

    @property
    def computed(self) -> int:
        """Tokens that are still to be forwarded."""
        return self.submitted - self.reused


def cannot_serve(cache: KVCache, tokens: int) -> str | None:
    """Why ``cache`` cannot go back to its first ``tokens`` tokens; ``None`` if it can."""
    why = cache.refusal(cache.position - tokens)
    return why and f"{why}; it was stored at token {cache.position:,} and needed at {tokens:,}"


def goes_back(cache: KVCache, tokens: int) -> bool:
    """Whether ``cache`` will still be able to go back when it has seen ``tokens`` tokens.

    If not, a copy of it has to be kept wherever it is to serve again.
    """
    return not cache.policy.gaps and all(
        not spec.has_states and not spec.compressed and spec.tokens_held(tokens) == tokens
        for spec in cache.specs
    )


def take_up(
    cache: KVCache, held: Sequence[int], prompt: Sequence[int], seconds: float | None = None
) -> Receipt:
    """Make ``cache``, which holds the tokens ``held``, hold only what ``prompt`` begins with.

    ``seconds`` is what forwarding ``held`` took. At least one token of the prompt stays to be
    forwarded. Where a layer cannot go back that far, the cache is emptied: a wrapped window or a
    recurrent state serves only a prompt that goes on exactly where it stands.
    """
    if cache.position != len(held):
        raise ValueError(f"the cache holds {cache.position} tokens, not {len(held)}")
    matched = common_prefix(held, prompt)
    reused = min(matched, len(prompt) - 1)
    why = ONE_TOKEN if reused < matched else None
    refusal = cannot_serve(cache, reused) if reused else None
    if refusal:
        reused, why = 0, refusal
    if reused:
        cache.trim(cache.position - reused)
    else:
        cache.reset()
    saved = seconds * reused / len(held) if seconds is not None and reused else None
    return Receipt(len(prompt), matched, reused, why, saved)
