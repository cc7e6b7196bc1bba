"""Loads a model's tokenizer. Imports transformers inside the function."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvgen.errors import ModelError
from kvgen.models.failures import failing_as_model_error
from kvgen.models.quiet import quiet_libraries
from kvgen.models.types import LoadOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Any one of these carries a vocabulary.
_VOCABULARIES = (
    "tokenizer.json",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    "*.model",
    "*.tiktoken",
)


def has_tokenizer(folder: Path) -> bool:
    """Whether any file there carries a vocabulary."""
    return any(any(folder.glob(pattern)) for pattern in _VOCABULARIES)


def load_tokenizer(folder: Path, name: str, options: LoadOptions) -> PreTrainedTokenizerBase:
    """The tokenizer in a model folder; ModelError when there is none or it cannot be read."""
    # transformers makes an empty tokenizer of some types when the files are absent.
    if not has_tokenizer(folder) and not (options.trust_remote_code and any(folder.glob("*.py"))):
        raise ModelError(f"{name}: no tokenizer in the model folder (such as tokenizer.json)")
    from transformers import AutoTokenizer

    with failing_as_model_error(f"{name}: cannot read the tokenizer"), quiet_libraries():
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                str(folder),
                trust_remote_code=options.trust_remote_code,
                local_files_only=options.offline or not options.trust_remote_code,
            )
        except ValueError as error:
            if "trust_remote_code" not in str(error):
                raise
            raise ModelError(
                f"{name}: its tokenizer needs Python code from its own repository; "
                "read that code, then pass --trust-remote-code to run it"
            ) from error
    if len(tokenizer) == 0:
        raise ModelError(f"{name}: the tokenizer has no vocabulary")
    return tokenizer
