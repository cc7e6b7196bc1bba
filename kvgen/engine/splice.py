"""A conversation's ids, kept as they were generated though its text is tokenized again.

Knows two verbs of a tokenizer only.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvgen.engine.text import UNFINISHED, Tokenizer

# Ids before a stretch of text that tell the tokenizer how it goes on (leading spaces).
_CONTEXT = 6
# The longest stretch in tokens that two ways to write one text are looked for in.
_LONGEST = 64


def splice(tokenizer: Tokenizer, held: Sequence[int], rendered: Sequence[int]) -> list[int]:
    """``rendered``, with what reads the same in ``held`` written as it is there.

    A model may write a text in other tokens than its tokenizer would. Both are walked from their
    beginning, and where they differ in tokens the shortest stretches of the same text are taken
    for each other. Special tokens are only ever the same as themselves: spelled out, they are
    text.
    """
    special = frozenset(getattr(tokenizer, "all_special_ids", ()))
    done = matched = 0
    while done < len(held) and matched < len(rendered):
        if held[done] == rendered[matched]:
            one, other = 1, 1
        else:
            context = list(held[max(0, done - _CONTEXT) : done])
            one, other = _same_text(
                tokenizer,
                context,
                _until(special, held[done : done + _LONGEST]),
                _until(special, rendered[matched : matched + _LONGEST]),
            )
            if not one:
                break
        done, matched = done + one, matched + other
    return [*held[:done], *rendered[matched:]]


def _until(special: frozenset[int], ids: Sequence[int]) -> list[int]:
    """The ids before the first special one."""
    end = next((index for index, token in enumerate(ids) if token in special), len(ids))
    return list(ids[:end])


def _same_text(
    tokenizer: Tokenizer, context: list[int], first: list[int], second: list[int]
) -> tuple[int, int]:
    """How many ids of both, at least, read the same after ``context``; zeros if none do."""
    one = other = 1
    while one <= len(first) and other <= len(second):
        left = tokenizer.decode(context + first[:one], skip_special_tokens=False)
        right = tokenizer.decode(context + second[:other], skip_special_tokens=False)
        if left == right and not left.endswith(UNFINISHED):
            return one, other
        # What ends inside a character says nothing yet of that character, unless no more comes.
        if left == right and one == len(first):
            end = _end_of_text(tokenizer, context + second, len(context) + other)
            return (one, end - len(context)) if end else (0, 0)
        left, right = left.rstrip(UNFINISHED), right.rstrip(UNFINISHED)
        if not (left.startswith(right) or right.startswith(left)):
            break
        shorter = len(left) <= len(right) and one < len(first)
        one, other = (one + 1, other) if shorter else (one, other + 1)
    return 0, 0


def _end_of_text(tokenizer: Tokenizer, ids: list[int], count: int) -> int | None:
    """How many of ``ids`` give the text of the first ``count``; ``None`` if those that follow
    change it.
    """
    text = tokenizer.decode(ids[:count], skip_special_tokens=False)
    for end in range(count + 1, len(ids) + 1):
        longer = tokenizer.decode(ids[:end], skip_special_tokens=False)
        if not longer.startswith(text):
            return None
        if len(longer) > len(text):
            return end - 1
    return len(ids)
