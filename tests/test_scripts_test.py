"""``scripts/test``: every stage, in order, each of which can fail the run."""

from __future__ import annotations

import subprocess
from pathlib import Path

from scripts_project import (
    REPOSITORY,
    Project,
    write_script,
)


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
