"""The file that ``--config`` names: TOML, with option values for all commands or for one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from kvgen.errors import UsageError, nearest


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Have the command take what the command line and the environment leave open from the file."""
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
