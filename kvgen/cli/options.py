"""Options that commands share, and where their values come from.

An option's value is what the command line says, else its ``KVGEN_*`` variable, else the file that
``--config`` names, else the default.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from kvgen.cli.parallel import DeviceMap, Parallel
from kvgen.errors import UsageError, nearest
from kvgen.machine import default_threads, usable_cores


def option(name: str, *others: str, **settings: Any) -> Any:
    """A ``typer.Option`` that ``KVGEN_<NAME>`` in the environment sets as well."""
    long = name.split("/")[0].removeprefix("--")
    variable = "KVGEN_" + long.upper().replace("-", "_")
    return typer.Option(name, *others, envvar=variable, show_envvar=False, **settings)


def _read_config(context: typer.Context, path: Path | None) -> Path | None:
    if path is not None:
        known = {
            long.removeprefix("--"): parameter
            for parameter in context.command.params
            for long in parameter.opts
            if long.startswith("--") and long not in ("--config", "--help")
        }
        commands = getattr(context.parent and context.parent.command, "commands", ())
        values = config_values(path, str(context.info_name), known, tuple(commands))
        lists = {str(p.name) for p in context.command.params if getattr(p, "multiple", False)}
        context.default_map = {
            name: [value] if name in lists and not isinstance(value, list) else value
            for name, value in values.items()
        }
    return path


def config_values(
    path: Path, command: str, known: dict[str, Any], commands: Sequence[str] = ()
) -> dict[str, Any]:
    """Option values by parameter name; ``known`` maps option names to the command's parameters.

    Tables may be named after any of ``commands``. Raises ``UsageError`` for an unknown key or
    table and for a value of the wrong type.
    """
    table = _load_toml(path)
    for name, value in table.items():
        if commands and isinstance(value, dict) and name not in commands:
            raise UsageError(f"{path}: there is no command {name!r}{nearest(name, commands)}")
    own = table.get(command, {})
    if not isinstance(own, dict):
        raise UsageError(f"{path}: {command} must be a table of options, not {own!r}")
    common = {key: value for key, value in table.items() if not isinstance(value, dict)}
    values = {}
    for key, value in (common | own).items():
        name = key.replace("_", "-")
        if name not in known:
            raise UsageError(f"{path}: unknown option {key!r}{nearest(name, known)}")
        values[str(known[name].name)] = _fitting(f"{path}: {key}", value, known[name])
    return values


def _fitting(where: str, value: Any, parameter: Any) -> Any:
    """A TOML value as the option takes it; the argument parser would read ``true`` as 1."""
    if getattr(parameter, "is_flag", False):
        fits, wanted = isinstance(value, bool), "true or false"
    elif getattr(parameter, "multiple", False):
        value = [value] if isinstance(value, str) else value
        fits = isinstance(value, list) and all(isinstance(item, str) for item in value)
        wanted = "text or a list of texts"
    else:
        fits = isinstance(value, str | int | float) and not isinstance(value, bool)
        wanted = "text or a number"
    if not fits:
        raise UsageError(f"{where} must be {wanted}, not {value!r}")
    return value


def _load_toml(path: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"cannot read the configuration file {path}: {reason}") from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from error


def _not_empty(stops: list[str] | None) -> list[str] | None:
    if "" in (stops or ()):
        raise UsageError("--stop needs text; an empty one would end everything at once")
    return stops


def _hush(quiet: bool) -> bool:
    """Silence warnings, from here on, where that is asked for."""
    if quiet:
        logging.getLogger("kvgen").setLevel(logging.ERROR)
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # read when it is imported
    return quiet


class Dtype(str, Enum):
    """Arithmetic of weights and cache."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class LoadFormat(str, Enum):
    """Where weights come from."""

    auto = "auto"
    dummy = "dummy"


class AttentionMode(str, Enum):
    """Whose code a single token attends with."""

    auto = "auto"
    model = "model"
    kvgen = "kvgen"


class Tune(str, Enum):
    """Whether products are chosen by timing."""

    auto = "auto"
    off = "off"


_MODEL, _TOKENS, _CACHE, _OUTPUT = "Model", "Tokens", "Cache and measuring", "Output"

ModelOption = Annotated[
    str | None,
    option(
        "--model",
        "-m",
        help="A folder, a .gguf file or a Hub id (default SmolLM2-135M-Instruct).",
        rich_help_panel=_MODEL,
    ),
]
RevisionOption = Annotated[
    str | None, option("--revision", help="Of a Hub model.", rich_help_panel=_MODEL)
]
DtypeOption = Annotated[
    Dtype, option("--dtype", help="auto: the checkpoint's.", rich_help_panel=_MODEL)
]
LoadFormatOption = Annotated[
    LoadFormat,
    option(
        "--load-format",
        help="dummy: random weights for the architecture file (as config.json) that --model names.",
        rich_help_panel=_MODEL,
    ),
]
DeviceOption = Annotated[
    str, option("--device", help="auto, cpu, cuda, cuda:N or mps.", rich_help_panel=_MODEL)
]
AttentionOption = Annotated[
    AttentionMode,
    option(
        "--attention",
        help="Of single tokens: the model's own, or kvgen's; auto: the faster.",
        rich_help_panel=_MODEL,
    ),
]
TuneOption = Annotated[
    Tune,
    option(
        "--tune",
        help="auto: linear layers multiply single rows the way that is faster here, timed once.",
        rich_help_panel=_MODEL,
    ),
]
ThreadsOption = Annotated[
    int | None,
    option("--threads", min=1, help="CPU threads of one operation.", rich_help_panel=_MODEL),
]
DeviceMapOption = Annotated[
    DeviceMap,
    option(
        "--device-map",
        help="auto: whole layers spread over the devices of this machine.",
        rich_help_panel=_MODEL,
    ),
]
ParallelOption = Annotated[
    Parallel,
    option(
        "--parallel",
        help="tensor: the model shared out over the ranks that torchrun started.",
        rich_help_panel=_MODEL,
    ),
]
RankTimeoutOption = Annotated[
    int,
    option(
        "--rank-timeout",
        min=1,
        help="Seconds after which a rank that does not answer ends the run.",
        rich_help_panel=_MODEL,
    ),
]
TrustRemoteCodeOption = Annotated[
    bool,
    option(
        "--trust-remote-code",
        help="Run Python code that the model's repository brings.",
        rich_help_panel=_MODEL,
    ),
]
OfflineOption = Annotated[
    bool, option("--offline", help="Never use the network.", rich_help_panel=_MODEL)
]
ForceOption = Annotated[
    bool,
    option(
        "--force",
        help="Go on where the memory that is free does not suffice.",
        rich_help_panel=_MODEL,
    ),
]
PromptFileOption = Annotated[
    Path | None, option("--prompt-file", help="Read the prompt from a file.")
]
ChatOption = Annotated[
    bool, option("--chat", help="Wrap the prompt in the chat template.", rich_help_panel=_TOKENS)
]
SystemOption = Annotated[
    str | None,
    option("--system", help="System message; implies --chat.", rich_help_panel=_TOKENS),
]
TemperatureOption = Annotated[
    float, option("--temperature", help="0 is greedy.", rich_help_panel=_TOKENS)
]
TopKOption = Annotated[
    int | None, option("--top-k", help="Only the k likeliest.", rich_help_panel=_TOKENS)
]
TopPOption = Annotated[
    float | None,
    option("--top-p", help="The likeliest, up to probability p.", rich_help_panel=_TOKENS),
]
MinPOption = Annotated[
    float | None,
    option(
        "--min-p",
        help="Those at least this fraction as likely as the likeliest.",
        rich_help_panel=_TOKENS,
    ),
]
RepetitionPenaltyOption = Annotated[
    float,
    option(
        "--repetition-penalty",
        help="Above 1: tokens that were there become less likely.",
        rich_help_panel=_TOKENS,
    ),
]
SeedOption = Annotated[
    int | None,
    option("--seed", min=0, help="The same seed gives the same text.", rich_help_panel=_TOKENS),
]
StopOption = Annotated[
    list[str] | None,
    option(
        "--stop",
        callback=_not_empty,
        help="End before this text; repeatable.",
        rich_help_panel=_TOKENS,
    ),
]
CacheOption = Annotated[
    str | None,
    option(
        "--cache",
        help="How pairs are stored: step, exact, int8, int4 or window:N,sink:M.  [default: step]",
        rich_help_panel=_CACHE,
    ),
]
PrefillChunkOption = Annotated[
    int | None,
    option(
        "--prefill-chunk",
        min=1,
        help="Forward the prompt in pieces of this many tokens.",
        rich_help_panel=_CACHE,
    ),
]
ParseSpecialOption = Annotated[
    bool,
    option(
        "--parse-special",
        help="Read special tokens that the prompt spells out, such as </s>, as what they name.",
        rich_help_panel="Tokens",
    ),
]
OutputOption = Annotated[
    Path | None,
    option("--output", "-o", help="Write there instead of stdout.", rich_help_panel=_OUTPUT),
]
QuietOption = Annotated[
    bool,
    option(
        "--quiet",
        "-q",
        callback=_hush,
        help="Nothing on stderr but errors.",
        rich_help_panel=_OUTPUT,
    ),
]
DebugOption = Annotated[
    bool, option("--debug", help="Show the traceback of an error.", rich_help_panel=_OUTPUT)
]
ConfigOption = Annotated[
    Path | None,
    option(
        "--config",
        callback=_read_config,
        is_eager=True,
        help="TOML file with option values; a table named after a command wins for that command.",
        rich_help_panel=_OUTPUT,
    ),
]


PromptCacheOption = Annotated[
    Path | None,
    option(
        "--prompt-cache",
        help="Take the prompt's beginning from this file, if it is there; keep the cache in it.",
        rich_help_panel="Cache and measuring",
    ),
]
PromptCacheReadOnlyOption = Annotated[
    bool,
    option(
        "--prompt-cache-ro",
        help="Never write the file of --prompt-cache.",
        rich_help_panel="Cache and measuring",
    ),
]


def check_prompt_cache(path: Path | None, read_only: bool) -> None:
    """Find what is wrong with a prompt-cache file's place before anything is loaded.

    Raises ``UsageError``.
    """
    from kvgen.cache.disk import open_cache_file
    from kvgen.cli.streams import check_target
    from kvgen.storage import is_device

    if path is None:
        if read_only:
            raise UsageError("--prompt-cache-ro says how --prompt-cache FILE is used; give both")
        return
    if is_device(path) or path.is_dir():
        raise UsageError(f"{path} cannot hold a cache: give a file")
    if read_only and not path.exists():
        raise UsageError(f"{path} is not there; without --prompt-cache-ro it is made")
    if not read_only:
        check_target(path)
    if path.exists():
        open_cache_file(path)  # what is none is refused before the model is loaded


def use_threads(threads: int | None) -> None:
    """Have torch use so many CPU threads, by default as many as help.

    Raises ``UsageError`` for more than this process may use.
    """
    if threads is None and "OMP_NUM_THREADS" in os.environ:
        return  # torch has read it
    cores = usable_cores()
    if threads is not None and threads > cores:  # thousands of them crash the process
        raise UsageError(f"--threads {threads}: {cores} can be used here; choose at most that")
    import torch

    torch.set_num_threads(threads or default_threads())
