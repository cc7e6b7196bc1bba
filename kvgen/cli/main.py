"""The ``kvgen`` command: commands registered, errors turned into one line and an exit code.

Neither torch nor transformers is imported before a command runs.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
from typing import Annotated, Any

import typer

from kvgen import __version__
from kvgen.cli.batch import batch
from kvgen.cli.cache import cache_app
from kvgen.cli.chat import chat
from kvgen.cli.compare import compare
from kvgen.cli.explain import explain
from kvgen.cli.generate import generate
from kvgen.cli.interrupts import INTERRUPTED, exit_code, note_interrupts
from kvgen.cli.ordered import OrderedCommand
from kvgen.cli.parallel import leave, quiet_other_ranks, settled
from kvgen.cli.report import report
from kvgen.cli.size import size
from kvgen.cli.streams import ReaderLeftError, leave_streams, prepare_streams
from kvgen.cli.verbatim import VerbatimCommand
from kvgen.cli.verify import verify
from kvgen.errors import KvgenError
from kvgen.models.failures import is_out_of_memory, one_line
from kvgen.report.units import visible

app = typer.Typer(
    name="kvgen",
    help="Generate text on a hand-written KV cache and see, token by token, what the cache buys.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=VerbatimCommand)(generate)
app.command(cls=VerbatimCommand)(chat)
app.command(cls=VerbatimCommand)(batch)
app.command(cls=OrderedCommand)(compare)
app.command()(report)
app.command()(explain)
app.command()(verify)
app.command()(size)
app.add_typer(cache_app, name="cache")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"kvgen {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    """Options before the command's name."""


def main() -> None:
    """Run the command line and exit with its code."""
    # While libraries are imported everything stays: to search it for cycles, time and again, would
    # take a quarter of a start. ``loading`` ends this.
    gc.disable()
    note_interrupts()
    quiet_other_ranks(next(iter(sys.argv[1:]), ""))
    prepare_streams()
    code = exit_code(run(sys.argv[1:]))
    leave_streams()
    leave(code)
    # Python would search all that the libraries made for cycles once more, most of a second long.
    gc.freeze()
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run one command line; every error becomes one line on stderr. Returns the exit code."""
    debug = _debugging(arguments)
    _show_warnings()
    code, message, error = 0, "", None
    try:
        found = app(arguments, prog_name="kvgen", standalone_mode=False)
        sys.stdout.flush()
        code = found if isinstance(found, int) else 0
    except (KeyboardInterrupt, Exception) as raised:
        error = raised
        code, message = _judged(error)
    code, message = settled(code, message, error)
    if debug and isinstance(error, Exception) and message:
        raise error
    return _fail(message, code) if message else code


def _judged(error: BaseException) -> tuple[int, str]:
    """The exit code of what a command raised, and its line; no line where nothing is wrong."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "interrupted"
    if isinstance(error, ReaderLeftError):
        return 0, ""
    if isinstance(error, KvgenError):
        return error.exit_code, str(error)
    if hasattr(error, "format_message"):  # what the argument parser raises
        return getattr(error, "exit_code", 2), _explained(error)
    if type(error).__name__ == "Abort":
        return INTERRUPTED, str(error) or "aborted"
    if is_out_of_memory(error):
        return 4, "out of memory"
    return 1, f"internal error: {type(error).__name__}: {one_line(error)} (--debug shows where)"


def _debugging(arguments: list[str]) -> bool:
    """Whether ``--debug`` is on, also where the arguments cannot be parsed."""
    variable = os.environ.get("KVGEN_DEBUG", "")
    return "--debug" in arguments or variable.lower() in ("1", "true", "yes")


def _explained(error: Any) -> str:
    """The argument parser's message, with where the value came from and what to do."""
    message = str(error.format_message()).replace("Value error, ", "")
    context, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
    if "unexpected extra argument" in message:
        known = {one.name for one in context.command.params} if context is not None else set()
        return (
            f"{message}; a prompt of several words needs quotes" if "prompt" in known else message
        )
    if context is None or parameter is None:
        return message
    source = context.get_parameter_source(parameter.name)
    if source is not None and source.name == "ENVIRONMENT":
        return f"{message} (it is {os.environ.get(parameter.envvar)!r} in {parameter.envvar})"
    if source is not None and source.name == "DEFAULT_MAP":
        return f"{message} (it is {context.default_map[parameter.name]!r} in the file of --config)"
    return message


def _show_warnings() -> None:
    """What kvgen's other rooms warn of, one line each on stderr, unless ``--quiet`` says no."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("kvgen: %(message)s"))
    logger = logging.getLogger("kvgen")
    logger.handlers = [handler]
    logger.setLevel(logging.WARNING)


def _fail(message: str, code: int) -> int:
    line = visible(" ".join(message.split()))
    with contextlib.suppress(OSError):
        print(f"kvgen: {line}", file=sys.stderr, flush=True)
    return code
