"""What a person writes is text, also where it reads like one of the model's special tokens.

Knows tokenizers only. A tokenizer takes ``<|im_end|>`` for the token that ends a turn wherever it
stands. In what comes from outside it would end a turn that its writer was never to end.
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvgen.errors import InputError

Message = dict[str, str]
"""One part of a conversation: its ``role`` (system, user or assistant) and its ``content``."""


def found_in(tokenizer: Any, texts: Iterable[str]) -> list[str]:
    """The special tokens that are spelled out in any of ``texts``, the longest first."""
    special = {token.content for token in _special(tokenizer).values() if token.content}
    joined = "\n".join(texts)
    return sorted((one for one in special if one in joined), key=len, reverse=True)


def encode_data(tokenizer: Any, text: str) -> list[int]:
    """The ids of ``text``, with what the tokenizer adds by itself, its special tokens as text.

    Raises ``InputError`` where the tokenizer cannot see them as text.
    """
    ids: list[int] = tokenizer(text, split_special_tokens=True, verbose=False)["input_ids"]
    own: list[int] = tokenizer("", verbose=False)["input_ids"]
    special = _special(tokenizer)
    if sum(i in special for i in ids) > sum(i in special for i in own):
        raise _inseparable(text, tokenizer)
    return ids


def encode_rendered(
    tokenizer: Any, messages: Sequence[Message], render: Callable[[Sequence[Message]], str]
) -> list[int]:
    """The ids of ``messages`` as ``render`` writes them, with special what ``render`` adds alone.

    The tokenizer splits a text at its special tokens first, and only then looks at the rest. So
    those that the template writes are replaced by stand-ins, which a copy of the tokenizer knows
    in their place; that copy takes the messages' own for text.

    Raises ``InputError`` where the tokenizer does not work that way.
    """
    contents = [message["content"] for message in messages]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not hasattr(backend, "encode_special_tokens"):
        raise _inseparable("\n".join(contents), tokenizer)
    nonce = secrets.token_hex(8)  # that no text can hold by chance or design
    spelled = {f"kvgen{nonce}x{n}x": one for n, one in enumerate(found_in(tokenizer, contents))}
    hidden = [m | {"content": _replaced(m["content"], _turned(spelled))} for m in messages]
    rendered = render(hidden)

    tokens = {token.content: (i, token) for i, token in _special(tokenizer).items()}
    names = found_in(tokenizer, [rendered])
    stand_ins = {one: f"\ue000{nonce}x{n}\ue001" for n, one in enumerate(names)}
    own: Any = copy.deepcopy(backend)
    own.encode_special_tokens = True
    own.add_tokens([_stand_in(name, tokens[one][1]) for one, name in stand_ins.items()])
    text = _replaced(_replaced(rendered, stand_ins), spelled)
    ids = {own.token_to_id(name): tokens[one][0] for one, name in stand_ins.items()}
    return [ids.get(i, i) for i in own.encode(text, add_special_tokens=False).ids]


def _special(tokenizer: Any) -> dict[int, Any]:
    """The tokens, by id, that the tokenizer calls special."""
    known = getattr(tokenizer, "added_tokens_decoder", {})
    return {i: token for i, token in known.items() if token.special}


def _stand_in(name: str, token: Any) -> Any:
    """A token of that name which is found as ``token`` is, but is not special."""
    from tokenizers import AddedToken

    return AddedToken(
        name,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=False,
    )


def _replaced(text: str, names: dict[str, str]) -> str:
    for name, other in names.items():
        text = text.replace(name, other)
    return text


def _turned(names: dict[str, str]) -> dict[str, str]:
    return {other: name for name, other in names.items()}


def _inseparable(text: str, tokenizer: Any) -> InputError:
    spelled = next(iter(found_in(tokenizer, [text])), "a special token")
    return InputError(
        f"the text holds {spelled}, which this model's tokenizer cannot read as text; take it out, "
        "or have it read as the special token it names (--parse-special)"
    )
