"""The errors a user can meet, each with its exit code. Imports nothing.

Raised where the problem is understood, turned into one line of text in ``kvgen.cli.main`` only.
The message says what was wrong, what was expected and what to do.
"""


class KvgenError(Exception):
    """Anything kvgen reports in one line instead of a traceback."""

    exit_code = 1


class UsageError(KvgenError):
    """Options or arguments that cannot be meant."""

    exit_code = 2


class ModelError(KvgenError):
    """The model or its tokenizer cannot be found, read, trusted or served."""

    exit_code = 3


class InputError(KvgenError):
    """The input does not fit: empty prompt, context length, memory."""

    exit_code = 4


class DisagreementError(KvgenError):
    """Cached and uncached forwards disagree."""

    exit_code = 5


class GateError(KvgenError):
    """A performance gate failed."""

    exit_code = 6
