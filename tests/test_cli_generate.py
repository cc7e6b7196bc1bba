"""``kvgen generate`` as a process: what is on stdout, what on stderr, and the exit code."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import pytest
from conftest import Cli

from kvgen.cli.streams import read_prompt
from kvgen.report.document import schema

COMMAND = [sys.executable, "-m", "kvgen", "generate"]


def one_line(stderr: str) -> str:
    """The error on stderr, having checked that it is one line and no traceback."""
    lines = stderr.splitlines()
    assert len(lines) == 1, stderr
    assert lines[0].startswith("kvgen: ")
    return lines[0]


def test_text_alone_is_on_stdout_and_the_table_on_stderr(process: Cli, tiny_folder: Path) -> None:
    done = process("generate", "Time", "-m", tiny_folder, "-n", "20", "--ignore-eos")
    plain = process("generate", "Time", "-m", tiny_folder, "-n", "20", "--ignore-eos", "--quiet")
    assert done.returncode == plain.returncode == 0
    assert done.stdout == plain.stdout != ""
    assert plain.stderr == ""
    assert "tiny-llama: float32 on cpu" in done.stderr
    assert "checked at 5 of 20 positions: identical" in done.stderr.splitlines()[-1]
    assert "\x1b" not in done.stderr


def test_no_line_of_the_table_is_wider_than_80_columns(cli: Cli, tiny_folder: Path) -> None:
    done = cli("generate", "Time", "-m", tiny_folder, "-n", "40", "--ignore-eos", "--trace")
    assert max(map(len, done.stderr.splitlines())) <= 80
    assert sum(line.lstrip()[:1].isdigit() for line in done.stderr.splitlines()) >= 40


def test_the_json_document_fits_its_schema(process: Cli, tiny_folder: Path) -> None:
    done = process("generate", "Time", "-m", tiny_folder, "-n", "12", "--ignore-eos", "-f", "json")
    document = json.loads(done.stdout)
    jsonschema.Draft202012Validator(schema()).validate(document)
    steps = document["steps"]
    assert [step["index"] for step in steps] == list(range(12))
    assert [step["cached_tokens"] for step in steps] == [4 + i for i in range(12)]
    assert [step["forwarded_tokens"] for step in steps] == [4] + [1] * 11
    assert "".join(step["text"] for step in steps) == document["text"]
    per_token = document["model"]["kv_bytes_per_token"]
    assert [s["kv_bytes_used"] for s in steps] == [per_token * s["cached_tokens"] for s in steps]
    assert document["kv_bytes_formula"] == steps[-1]["kv_bytes_used"]
    assert document["totals"]["forwarded_tokens"] == 4 + 11
    assert document["totals"]["decode_s"] == pytest.approx(sum(s["latency_s"] for s in steps[1:]))
    assert all(step["recompute_s"] > 0 for step in steps)
    assert [s["recompute_source"] for s in steps].count("measured") == 5
    assert document["check"]["verdict"] == "exact"


def test_every_step_is_measured_and_checked_when_all_are_asked_for(
    cli: Cli, tiny_folder: Path
) -> None:
    done = cli(
        *("generate", "Time", "-m", tiny_folder, "-n", "9", "--ignore-eos"),
        *("-f", "json", "--recompute", "all"),
    )
    document = json.loads(done.stdout)
    assert {step["recompute_source"] for step in document["steps"]} == {"measured"}
    assert [step["index"] for step in document["check"]["steps"]] == list(range(9))


def test_json_lines_come_as_run_steps_and_result(cli: Cli, tiny_folder: Path) -> None:
    done = cli("generate", "Time", "-m", tiny_folder, "-n", "6", "--ignore-eos", "-f", "jsonl")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["type"] for line in lines] == ["run"] + ["step"] * 6 + ["result"]
    whole = {k: v for line in (lines[0], lines[-1]) for k, v in line.items() if k != "type"}
    recompute = {line["index"]: line for line in whole.pop("recompute")}
    whole["steps"] = [
        {k: v for k, v in line.items() if k != "type"} | recompute[line["index"]]
        for line in lines[1:-1]
    ]
    whole |= {"prompt": "Time", "prompt_ids": [1], "prefill_chunk": None}
    jsonschema.Draft202012Validator(schema()).validate(whole)


def test_without_a_cache_the_text_is_the_same_and_no_byte_is_cached(
    cli: Cli, tiny_folder: Path
) -> None:
    arguments = ("generate", "Time flies", "-m", tiny_folder, "-n", "10", "-f", "json")
    cached = json.loads(cli(*arguments).stdout)
    uncached = json.loads(cli(*arguments, "--no-cache").stdout)
    jsonschema.Draft202012Validator(schema()).validate(uncached)
    assert [s["token_id"] for s in cached["steps"]] == [s["token_id"] for s in uncached["steps"]]
    assert {step["kv_bytes_used"] for step in uncached["steps"]} == {0}
    assert [s["forwarded_tokens"] for s in uncached["steps"]] == list(
        range(10, 10 + len(uncached["steps"]))
    )
    assert uncached["cached"] is False
    assert uncached["check"] is None


def test_the_prompt_comes_from_argument_dash_pipe_or_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("Time flies\n", "utf-8")

    def prompt(argument: str | None, path: Path | None, piped: str) -> str:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(piped.encode())))
        return read_prompt(argument, path)

    assert prompt("Time flies", None, "ignored") == "Time flies"
    assert prompt("-", None, "Time flies\n") == "Time flies"
    assert prompt(None, None, "Time flies\r\n") == "Time flies"
    assert prompt(None, file, "ignored") == "Time flies"
    assert prompt(None, None, "two breaks\n\n") == "two breaks\n"


def test_a_piped_prompt_is_continued(process: Cli, tiny_folder: Path) -> None:
    done = process("generate", "-m", tiny_folder, "-n", "3", "-f", "json", stdin="Time flies\n")
    assert json.loads(done.stdout)["prompt"] == "Time flies"


def test_the_same_seed_gives_the_same_bytes(cli: Cli, tiny_folder: Path) -> None:
    base = ("generate", "Time", "-m", tiny_folder, "-n", "20", "-q", "--temperature", "1.5")
    first, again, other = (cli(*base, "--seed", seed).stdout for seed in ("5", "5", "6"))
    assert first == again != other


def test_output_goes_to_a_file_whole(cli: Cli, tiny_folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    done = cli("generate", "Time", "-m", tiny_folder, "-n", "3", "-f", "json", "-o", target)
    assert done.stdout == ""
    assert json.loads(target.read_text("utf-8"))["prompt"] == "Time"
    assert list(tmp_path.iterdir()) == [target]


def test_settings_come_from_line_then_environment_then_file(
    cli: Cli, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = tmp_path / "run.toml"
    profile.write_text(
        f'model = "{tiny_folder}"\nmax-new-tokens = 2\n[generate]\nformat = "json"\nquiet = true\n',
        "utf-8",
    )

    def new_tokens(*arguments: str, **extra: str) -> int:
        with monkeypatch.context() as patch:
            for name, value in extra.items():
                patch.setenv(name, value)
            done = cli("generate", "Time", "--config", profile, *arguments)
        return len(json.loads(done.stdout)["steps"])

    assert new_tokens() == 2
    assert new_tokens(KVGEN_MAX_NEW_TOKENS="3") == 3
    assert new_tokens("-n", "4", KVGEN_MAX_NEW_TOKENS="3") == 4


def test_a_reader_that_leaves_ends_it_quietly(tiny_folder: Path) -> None:
    line = (
        f"{sys.executable} -m kvgen generate Time -m {tiny_folder} -n 100 --ignore-eos | head -c 5"
    )
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {line}"], capture_output=True, timeout=120
    )
    assert len(done.stdout) == 5
    assert done.returncode == 0
    assert b"Traceback" not in done.stderr
    assert b"BrokenPipe" not in done.stderr


def test_ctrl_c_keeps_the_text_prints_the_table_and_exits_130(tiny_folder: Path) -> None:
    with subprocess.Popen(
        [*COMMAND, "Time", "-m", str(tiny_folder), "-n", "110", "--ignore-eos"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        stdin=subprocess.DEVNULL,
        env=os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": slow_steps(tiny_folder.parent)},
    ) as process:
        assert process.stdout is not None
        start = process.stdout.read(3)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert len(start + rest) >= 3
    assert "interrupted" in errors
    assert "total" in errors
    assert "Traceback" not in errors


def slow_steps(folder: Path) -> str:
    """A folder that, on the module path, slows every step, so that a signal falls between them."""
    extra = folder / "slow"
    extra.mkdir(exist_ok=True)
    (extra / "sitecustomize.py").write_text(
        "import kvgen.engine.decoder as d, time\n"
        "step = d.Decoder.step\n"
        "d.Decoder.step = lambda self: (time.sleep(0.2), step(self))[1]\n",
        "utf-8",
    )
    return os.pathsep.join([str(extra), os.getcwd(), os.environ.get("PYTHONPATH", "")])


def wait_for_torch(process: subprocess.Popen[str]) -> None:
    """Until the process is past Python's own start and imports what it needs."""
    maps = Path(f"/proc/{process.pid}/maps")
    end = time.monotonic() + 60
    while maps.exists() and "libtorch" not in maps.read_text("utf-8"):
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.02)
    if not maps.exists():  # where the system shows no such thing
        time.sleep(2.0)


def test_ctrl_c_while_loading_exits_130_with_one_line(tiny_folder: Path) -> None:
    with subprocess.Popen(
        [*COMMAND, "Time", "-m", str(tiny_folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        stdin=subprocess.DEVNULL,
    ) as process:
        wait_for_torch(process)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors


ERRORS: list[tuple[str, list[str], int, str]] = [
    ("empty prompt", ["generate", ""], 4, "the prompt is empty"),
    ("unknown model", ["generate", "x", "-m", "no/such-model"], 3, "no/such-model"),
    ("bad option", ["generate", "x", "--temprature", "1"], 2, "--temperature"),
    ("bad value", ["generate", "x", "-n", "many"], 2, "--max-new-tokens"),
    ("n below 1", ["generate", "x", "-n", "0"], 2, "--max-new-tokens"),
    ("bad format", ["generate", "x", "-f", "yaml"], 2, "yaml"),
    ("greedy with top-k", ["generate", "x", "--top-k", "3"], 2, "--temperature"),
    ("no command", ["generrate"], 2, "generate"),
    ("missing prompt file", ["generate", "--prompt-file", "/no/such/file"], 2, "/no/such/file"),
    ("two prompts", ["generate", "x", "--prompt-file", "y"], 2, "once"),
    ("missing config", ["generate", "x", "--config", "/no/such.toml"], 2, "/no/such.toml"),
    ("chunk without cache", ["generate", "x", "--no-cache", "--prefill-chunk", "2"], 2, "cache"),
    ("output to nowhere", ["generate", "x", "-o", "/no/such/folder/file"], 2, "/no/such/folder"),
]


@pytest.mark.parametrize(
    ("arguments", "code", "says"), [e[1:] for e in ERRORS], ids=[e[0] for e in ERRORS]
)
def test_a_user_error_is_one_line_with_its_exit_code(
    arguments: list[str], code: int, says: str, cli: Cli
) -> None:
    done = cli(*arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert says in one_line(done.stderr)


def test_an_unknown_key_in_a_profile_names_the_nearest(tmp_path: Path, cli: Cli) -> None:
    profile = tmp_path / "run.toml"
    profile.write_text("max-new-token = 3\n", "utf-8")
    done = cli("generate", "x", "--config", profile)
    assert done.returncode == 2
    assert "'max-new-tokens'" in one_line(done.stderr)


def test_a_prompt_beyond_the_context_gives_the_numbers(tiny_folder: Path, cli: Cli) -> None:
    done = cli("generate", "x" * 500, "-m", tiny_folder)
    assert done.returncode == 4
    assert "500 tokens" in one_line(done.stderr)
    assert "128" in done.stderr


def test_a_request_beyond_the_context_says_how_many_fit(tiny_folder: Path, cli: Cli) -> None:
    done = cli("generate", "x" * 100, "-m", tiny_folder, "-n", "29")
    assert done.returncode == 4
    assert "-n 28" in one_line(done.stderr)
    assert cli("generate", "x" * 100, "-m", tiny_folder, "-n", "28", "-q").returncode == 0


def test_a_prompt_that_is_not_utf8_is_refused(cli: Cli, tiny_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "latin1.txt"
    file.write_bytes(b"caf\xe9")
    done = cli("generate", "-m", tiny_folder, "--prompt-file", file)
    assert done.returncode == 4
    assert "UTF-8" in one_line(done.stderr)


def test_a_wrong_cache_is_exit_code_5_and_shows_no_gain(
    tiny_folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvgen.cache.slots import TokenSlots

    update = TokenSlots.update

    def forgetful(self, keys, values):  # type: ignore[no-untyped-def]
        keys, values = update(self, keys, values)
        if values.shape[2] > 12:  # later than the warm-up looks
            values[:, :, 0] = 0  # the oldest value is lost
        return keys, values

    monkeypatch.setattr(TokenSlots, "update", forgetful)
    done = cli("generate", "Time flies", "-m", tiny_folder, "-n", "6", "--ignore-eos")
    assert done.returncode == 5
    assert "disagree" in done.stderr.splitlines()[-1]
    assert "BROKEN" in done.stderr
    assert "gain" not in done.stderr


@pytest.mark.newest
def test_a_model_that_attends_both_ways_is_refused_before_any_text(
    tmp_path: Path, cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    from families import tiny_model
    from tiny import save_tiny_tokenizer

    tiny_model("roberta", vocab_size=257, is_decoder=False).save_pretrained(tmp_path)
    save_tiny_tokenizer(tmp_path)
    capsys.readouterr()
    done = cli("generate", "Time flies", "-m", tmp_path)
    assert (done.returncode, done.stdout) == (5, "")
    assert "is_decoder = false" in one_line(done.stderr)
    assert cli("generate", "Time flies", "-m", tmp_path, "--no-cache", "-n", "3").returncode == 0


@pytest.mark.newest
@pytest.mark.parametrize("model_type", ["openai-gpt", "minimax"])
def test_a_model_without_such_a_cache_is_refused_by_name_and_runs_without(
    model_type: str, tmp_path: Path, cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    from families import tiny_config
    from tiny import save_tiny_tokenizer
    from transformers import AutoModelForCausalLM

    config = tiny_config(model_type, vocab_size=257)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    save_tiny_tokenizer(tmp_path)
    capsys.readouterr()
    done = cli("generate", "Time flies", "-m", tmp_path)
    assert (done.returncode, done.stdout) == (3, "")
    assert model_type in one_line(done.stderr)
    assert "--no-cache" in done.stderr
    assert cli("generate", "Time flies", "-m", tmp_path, "--no-cache", "-n", "3").returncode == 0


def test_stop_strings_end_the_text_and_are_not_shown(cli: Cli, tiny_folder: Path) -> None:
    base = ("generate", "Time", "-m", tiny_folder, "-n", "30", "--ignore-eos", "-q")
    text = cli(*base).stdout
    done = cli(*base, "-f", "json", "--stop", text[6:9])
    document = json.loads(done.stdout)
    assert document["text"] == text[: text.index(text[6:9])]
    assert (document["finish_reason"], document["stop_string"]) == ("stop", text[6:9])


def test_help_and_import_load_neither_torch_nor_transformers() -> None:
    for argument in ("--help", "--version"):
        code = (
            "import sys\n"
            "from kvgen.cli.main import run\n"
            f"assert run([{argument!r}]) == 0\n"
            "assert not {'torch', 'transformers'} & set(sys.modules)\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.real
def test_the_default_model_answers_in_json(process: Cli) -> None:
    done = process("generate", "Time flies", "-n", "16", "--format", "json")
    document = json.loads(done.stdout)
    jsonschema.Draft202012Validator(schema()).validate(document)
    assert document["model"]["kv_bytes_per_token"] == 46_080
    assert document["check"]["verdict"] == "exact"
