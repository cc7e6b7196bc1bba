"""Options that commands share.

An option's value is what the command line says, else its ``KVGEN_*`` variable, else the file that
``--config`` names (see ``config``), else the default.
"""

from __future__ import annotations

import logging
import os
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from kvgen.cli.config import read_config
from kvgen.cli.parallel import DeviceMap, Parallel
from kvgen.errors import UsageError
from kvgen.machine import default_threads, usable_cores


def option(name: str, *others: str, **settings: Any) -> Any:
    """A ``typer.Option`` that ``KVGEN_<NAME>`` in the environment sets as well."""
    long = name.split("/")[0].removeprefix("--")
    variable = "KVGEN_" + long.upper().replace("-", "_")
    return typer.Option(name, *others, envvar=variable, show_envvar=False, **settings)


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


class TextOrJson(str, Enum):
    """What stdout carries."""

    text = "text"
    json = "json"


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
IgnoreEosOption = Annotated[
    bool, option("--ignore-eos", help="Go on after end-of-text.", rich_help_panel=_TOKENS)
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
PromptCacheOption = Annotated[
    Path | None,
    option(
        "--prompt-cache",
        help="Take the prompt's beginning from this file, if it is there; keep the cache in it.",
        rich_help_panel=_CACHE,
    ),
]
PromptCacheReadOnlyOption = Annotated[
    bool,
    option(
        "--prompt-cache-ro",
        help="Never write the file of --prompt-cache.",
        rich_help_panel=_CACHE,
    ),
]
ParseSpecialOption = Annotated[
    bool,
    option(
        "--parse-special",
        help="Read special tokens that the prompt spells out, such as </s>, as what they name.",
        rich_help_panel=_TOKENS,
    ),
]
TextOrJsonOption = Annotated[
    TextOrJson, option("--format", "-f", help="What stdout carries.", rich_help_panel=_OUTPUT)
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
        callback=read_config,
        is_eager=True,
        help="TOML file with option values; a table named after a command wins for that command.",
        rich_help_panel=_OUTPUT,
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
