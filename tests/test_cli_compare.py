"""``kvgen compare`` and ``kvgen report`` as command lines: documents, gates, exports, signals."""

from __future__ import annotations

import csv
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from conftest import Cli, Done

from kvgen.cli.values import depths, part, size
from kvgen.errors import UsageError
from kvgen.report.document import schema

ARCHITECTURE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 8192,
}
SHORT = ("--prompt-tokens", "12", "-n", "4", "-r", "2")


@pytest.fixture
def architecture(tmp_path: Path) -> Path:
    """A file that describes a tiny model, without weights and tokenizer."""
    file = tmp_path / "tiny.json"
    file.write_text(json.dumps(ARCHITECTURE), "utf-8")
    return file


def valid(text: str) -> dict[str, Any]:
    """The one document in ``text``, having held it against its schema."""
    document: dict[str, Any] = json.loads(text)
    jsonschema.Draft202012Validator(schema("compare-1")).validate(document)
    return document


def contestants(document: dict[str, Any]) -> list[str]:
    return [one["name"] for one in document["contestants"]]


def test_alone_it_compares_with_no_cache_and_proves_it(cli: Cli, tiny_folder: Path) -> None:
    done = cli("compare", "-m", tiny_folder, *SHORT)
    assert done.returncode == 0
    assert "no-cache" in done.stdout
    assert "exact" in done.stdout
    assert "Where the time went" in done.stdout
    assert "time per step against position" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_the_json_document_fits_its_schema_and_its_totals_its_samples(
    cli: Cli, tiny_folder: Path
) -> None:
    done = cli(
        *("compare", "-m", tiny_folder, *SHORT, "--depth", "0,20", "-f", "json"),
        *("--no-cache", "--against", "generate", "--fail-under-speedup", "0"),
    )
    document = valid(done.stdout)
    assert document["complete"] is True
    assert len(document["runs"]) == 2 * 3 * 2
    assert all(run["total_s"] == sum(run["latencies_s"]) for run in document["runs"])
    assert document["environment"]["threads"] >= 1
    assert document["gates"][0]["passed"] is True
    for row in document["rows"]:
        for result in row["results"]:
            runs = [
                run
                for run in document["runs"]
                if (run["depth"], run["contestant"]) == (row["depth"], result["contestant"])
            ]
            assert result["tpot_s"]["count"] == len(runs) == 2
            means = sorted(sum(run["latencies_s"][1:]) / 3 for run in runs)
            assert result["tpot_s"]["median"] == pytest.approx(sum(means) / 2)


def test_contestants_keep_the_order_of_the_command_line(cli: Cli, tiny_folder: Path) -> None:
    done = cli(
        *("compare", "-m", tiny_folder, "--prompt-tokens", "4", "-n", "2", "-r", "1", "-f", "json"),
        *("--against", "generate", "--dtype", "float32", "--cache", "step", "--no-cache"),
        *("--dtype=bfloat16", "--against=transformers"),
    )
    document = valid(done.stdout)
    rest = ["generate", "kvgen step", "no-cache", "kvgen bfloat16", "transformers"]
    assert contestants(document) == ["kvgen", *rest]
    assert [run["contestant"] for run in document["runs"]] == ["kvgen", *rest]


def test_a_failed_gate_is_exit_code_6_after_a_whole_document(
    process: Cli, tiny_folder: Path
) -> None:
    done = process(
        *("compare", "--no-cache", "-m", tiny_folder, *SHORT, "-f", "json", "-q"),
        *("--fail-under-speedup", "1000", "--max-kv-bytes", "1KiB", "--max-ttft-ms", "600000"),
    )
    document = valid(done.stdout)
    assert done.returncode == 6
    assert document["complete"] is True
    assert [gate["passed"] for gate in document["gates"]] == [False, True, False]
    lines = done.stderr.splitlines()
    assert len(lines) == 1
    assert "--fail-under-speedup" in lines[0]
    assert "--max-kv-bytes" in lines[0]


def test_what_libraries_print_stays_out_of_the_document(
    cli: Cli, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import warnings

    from kvgen.engine.forward import Forward

    run = Forward._run

    def noisy(self: Forward, *arguments: Any, **inputs: Any) -> Any:
        print("a library prints")
        warnings.warn("a library warns", stacklevel=1)
        return run(self, *arguments, **inputs)

    monkeypatch.setattr(Forward, "_run", noisy)
    with pytest.warns(UserWarning, match="a library warns"):
        done = cli("compare", "-m", tiny_folder, *SHORT, "-f", "json")
    valid(done.stdout)
    assert "a library prints" in done.stderr


def test_a_broken_contestant_is_exit_code_5_before_any_gate(
    cli: Cli, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvgen.engine.forward import Forward

    inputs = Forward._inputs
    monkeypatch.setattr(
        Forward, "_inputs", lambda self, new, cache, at: inputs(self, new, cache, at + (at > 0))
    )
    done = cli("compare", "-m", tiny_folder, *SHORT, "--fail-under-speedup", "1000")
    assert done.returncode == 5
    assert "BROKEN" in done.stderr
    assert "BROKEN" in done.stdout
    assert not any("x ±" in line for line in done.stdout.splitlines())
    assert "Where the time went" not in done.stdout


def test_json_lines_come_as_run_rows_and_result(cli: Cli, tiny_folder: Path) -> None:
    done = cli("compare", "-m", tiny_folder, *SHORT, "--depth", "0,9", "-f", "jsonl")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line.pop("type") for line in lines] == ["run", "row", "row", "result"]
    rows = lines[1:3]
    whole: dict[str, Any] = {**lines[0], **lines[3], "rows": rows}
    whole["runs"] = [run for row in rows for run in row.pop("runs")]
    valid(json.dumps(whole))


def test_a_whole_sweep_can_be_exported_in_every_format(
    cli: Cli, tiny_folder: Path, tmp_path: Path
) -> None:
    names = ["r.json", "r.jsonl", "r.csv", "r.md", "r.txt"]
    exports = [word for name in names for word in ("--export", str(tmp_path / name))]
    done = cli("compare", "-m", tiny_folder, *SHORT, "--depth", "0,9", "-q", *exports)
    assert done.returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    valid((tmp_path / "r.json").read_text("utf-8"))
    rows = list(csv.DictReader((tmp_path / "r.csv").read_text("utf-8").splitlines()))
    assert [(row["depth"], row["contestant"]) for row in rows] == [
        ("0", "kvgen"), ("0", "no-cache"), ("9", "kvgen"), ("9", "no-cache"),
    ]  # fmt: skip
    assert rows[1]["verdict"] == "exact"
    assert float(rows[1]["speedup"]) > 0
    assert (tmp_path / "r.txt").read_text("utf-8") == done.stdout
    assert "| 9 | no-cache |" in (tmp_path / "r.md").read_text("utf-8")


def test_saved_results_are_shown_again_and_side_by_side(
    cli: Cli, tiny_folder: Path, tmp_path: Path
) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    shown = cli("compare", "-m", tiny_folder, *SHORT, "--export", first).stdout
    cli("compare", "-m", tiny_folder, *SHORT, "--against", "transformers", "--export", second)
    assert cli("report", first).stdout == shown
    assert cli("report", first, "-f", "json").stdout == first.read_text("utf-8")
    both = cli("report", first, second)
    assert max(map(len, both.stdout.splitlines())) <= 80
    assert "first       0  no-cache" in both.stdout
    assert "second      0  transformers" in both.stdout
    document = json.loads(cli("report", first, second, "-f", "json").stdout)
    assert [run["title"] for run in document["runs"]] == ["first", "second"]
    target = tmp_path / "both.csv"
    cli("report", first, second, "--export", target)
    rows = list(csv.DictReader(target.read_text("utf-8").splitlines()))
    assert [row["run"] for row in rows] == ["first", "first", "second", "second"]


def one_line(done: Done) -> str:
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is not JSON"),
        ("[1]", "no schema"),
        ('{"schema": "kvgen.compare/99"}', "'kvgen.compare/99' where 'kvgen.compare/1'"),
        ('{"schema": "kvgen.compare/1"}', "not a whole kvgen.compare/1 document"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_what_is_no_result_is_refused_in_one_line(
    content: str, says: str, cli: Cli, tmp_path: Path
) -> None:
    file = tmp_path / "other.json"
    file.write_text(content, "utf-8")
    done = cli("report", file)
    assert done.returncode == 2
    assert says in one_line(done)


def test_a_result_without_contestants_is_refused(
    cli: Cli, tiny_folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "none.json"
    cli("compare", "-m", tiny_folder, *SHORT, "--export", file)
    document = json.loads(file.read_text("utf-8"))
    file.write_text(json.dumps(document | {"contestants": []}), "utf-8")
    done = cli("report", file)
    assert done.returncode == 2
    assert "contestants and depths may not be empty" in one_line(done)


def test_a_regression_against_a_baseline_is_exit_code_6(
    cli: Cli, tiny_folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "base.json"
    cli("compare", "-m", tiny_folder, *SHORT, "--export", file)
    document = json.loads(file.read_text("utf-8"))
    against = ("--baseline", file, "--max-regression", "10%")

    def with_baseline(factor: float) -> Done:
        tpot = document["rows"][0]["results"][0]["tpot_s"]
        changed = json.loads(json.dumps(document))
        changed["rows"][0]["results"][0]["tpot_s"] = {
            name: value * factor if name != "count" else value for name, value in tpot.items()
        }
        file.write_text(json.dumps(changed), "utf-8")
        return cli("compare", "-m", tiny_folder, *SHORT, *against)

    worse = with_baseline(1e-3)
    assert worse.returncode == 6
    assert "slower" in worse.stderr.splitlines()[-1]
    assert "FAILED: --max-regression" in worse.stdout
    assert with_baseline(1e3).returncode == 0
    document = json.loads(file.read_text("utf-8"))
    document["model"]["parameters"] += 1
    file.write_text(json.dumps(document), "utf-8")
    other = cli("compare", "-m", tiny_folder, *SHORT, *against)
    assert (other.returncode, other.stdout) == (2, "")
    assert "hold a model against itself" in one_line(other)


def test_a_job_summary_is_appended_where_there_is_one(
    cli: Cli, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "summary.md"
    page.write_text("before\n", "utf-8")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(page))
    cli("compare", "-m", tiny_folder, *SHORT, "-f", "json")
    text = page.read_text("utf-8")
    assert text.startswith("before\n### kvgen compare:")
    assert "| no-cache |" in text


def test_tokens_are_saved_and_replayed(cli: Cli, tiny_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    base = ("compare", "-m", tiny_folder, "-r", "1", "-f", "json")
    first = valid(cli(*base, "Time flies", "-n", "5", "--save-tokens", file).stdout)
    again = valid(cli(*base, "--tokens", file).stdout)
    for field in ("context_ids", "new_ids", "depth"):
        assert again["rows"][0][field] == first["rows"][0][field]
    assert (first["prompt_source"], again["prompt_source"]) == ("given", "tokens")


def test_a_depth_beyond_the_context_is_named(cli: Cli, tiny_folder: Path) -> None:
    done = cli("compare", "-m", tiny_folder, *SHORT, "--depth", "0,99999")
    assert (done.returncode, done.stdout) == (4, "")
    assert "at depth 99,999" in one_line(done)


def test_an_architecture_file_is_measured_with_random_weights(cli: Cli, architecture: Path) -> None:
    base = ("compare", "-m", architecture, "--load-format", "dummy", *SHORT)
    assert "(random weights), float32" in " ".join(cli(*base).stdout.split())
    document = valid(cli(*base, "-f", "json", "--dtype", "bfloat16").stdout)
    assert document["random_weights"] is True
    assert document["model"]["source"] == "random weights"
    assert any("random weights" in note for note in document["notes"])
    assert document["environment"]["dtype"] == "bfloat16"


ERRORS: list[tuple[str, list[str], str]] = [
    ("rival", ["--against", "vllm"], "transformers, transformers-static, generate"),
    ("cache", ["--cache", "magic"], "kvgen has: step"),
    ("depth", ["--depth", "1-2-3"], "0,512,2048"),
    ("no depth", ["--depth", ""], "0,512,2048"),
    ("countless depths", ["--depth", "0-99999999999+1"], "take larger steps"),
    ("size", ["--max-kv-bytes", "much"], "24GiB"),
    ("part", ["--baseline", "x", "--max-regression", "some"], "10%"),
    ("no limit", ["--baseline", "x"], "belong together"),
    ("no baseline", ["--baseline", "/no/such", "--max-regression", "1%"], "/no/such"),
    ("suffix", ["--export", "out.xls"], ".csv"),
    ("folder", ["--export", "/no/such/folder/out.csv"], "folder must exist"),
    ("same file", ["--export", "o.csv", "--export", "o.csv"], "name each file once"),
    ("plot suffix", ["--plot", "out.jpg"], ".svg, .png, .html"),
    ("tokens and prompt", ["x", "--tokens", "t.json"], "leave those options out"),
    ("no tokens", ["--tokens", "/no/such.json"], "/no/such.json: No such file"),
    ("prompt and length", ["x", "--prompt-tokens", "3"], "built-in"),
    ("chat alone", ["--chat"], "need a prompt"),
    ("dummy without file", ["--load-format", "dummy"], "architecture file"),
    ("repetitions", ["-r", "0"], "--repetitions"),
]


@pytest.mark.parametrize(("arguments", "says"), [e[1:] for e in ERRORS], ids=[e[0] for e in ERRORS])
def test_a_user_error_is_one_line_with_exit_code_2(
    arguments: list[str], says: str, cli: Cli, tiny_folder: Path
) -> None:
    model = [] if "dummy" in arguments else ["-m", str(tiny_folder)]
    done = cli("compare", *model, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in one_line(done)


def test_a_profile_may_name_one_value_of_a_repeatable_option(
    cli: Cli, tiny_folder: Path, tmp_path: Path
) -> None:
    profile = tmp_path / "run.toml"
    profile.write_text('[compare]\nagainst = "transformers"\nformat = "json"\n', "utf-8")
    document = valid(cli("compare", "-m", tiny_folder, *SHORT, "--config", profile).stdout)
    assert contestants(document) == ["kvgen", "transformers"]


def test_depths_sizes_and_parts_are_read() -> None:
    assert depths("0,512,2048") == (0, 512, 2048)
    assert depths("128-4096*2") == (128, 256, 512, 1024, 2048, 4096)
    assert depths("128-1000*2,0") == (0, 128, 256, 512)
    assert depths("0-10+4,4") == (0, 4, 8)
    for wrong in ("", "a", "-1", "1,,2", "5-1*2", "0-8*2", "1-8*1", "1-8+0", "1-8"):
        with pytest.raises(UsageError):
            depths(wrong)
    assert [size("x", text) for text in ("46080", "1KiB", "1kB", "1.5 MiB", "2G")] == [
        46080, 1024, 1000, 1_572_864, 2_000_000_000,
    ]  # fmt: skip
    assert (part("x", "10%"), part("x", "0.1"), part("x", "0")) == (0.1, 0.1, 0.0)
    for wrong in ("-1%", "ten", "1%%", "nan"):
        with pytest.raises(UsageError):
            part("x", wrong)


def started(*arguments: str | Path, **settings: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "kvgen", "compare", *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, **{"stdout": pipe, "stderr": pipe, "stdin": subprocess.DEVNULL, "text": True}
        | settings
    )  # fmt: skip


def sweep(architecture: Path, export: Path) -> tuple[str | Path, ...]:
    """A sweep that takes much longer than a test waits."""
    base = ("-m", architecture, "--load-format", "dummy", "--prompt-tokens", "8", "-n", "3")
    return (*base, "--depth", "0,1024,4096", "-r", "20", "--export", export)


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    limit = time.monotonic() + 90
    while not path.exists():
        if process.poll() is not None or time.monotonic() > limit:
            process.kill()
            pytest.fail(str(process.communicate()))
        time.sleep(0.005)


@pytest.mark.parametrize("delay", [0.0, 0.3])
def test_a_killed_sweep_leaves_a_readable_file(
    delay: float, architecture: Path, tmp_path: Path
) -> None:
    export = tmp_path / "out.csv"
    with started(*sweep(architecture, export)) as process:
        wait_for(export, process)
        time.sleep(delay)
        process.kill()
        process.communicate()
    rows = list(csv.DictReader(export.read_text("utf-8").splitlines()))
    assert rows[0]["depth"] == "0"
    assert len(rows) % 2 == 0
    assert all(None not in row and None not in row.values() for row in rows)
    assert {row["verdict"] for row in rows} == {"reference", "exact"}


def test_ctrl_c_shows_what_was_measured_and_exits_130(architecture: Path, tmp_path: Path) -> None:
    export = tmp_path / "out.json"
    with started(*sweep(architecture, export)) as process:
        wait_for(export, process)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "at most 20 runs each, in turn NOT COMPLETE" in " ".join(out.split())
    assert "no-cache" in out
    assert "Traceback" not in errors
    document = valid(export.read_text("utf-8"))
    assert document["complete"] is False
    assert any("interrupted" in note for note in document["notes"])


def test_the_progress_bar_is_on_a_terminal_only(architecture: Path) -> None:
    arguments = ("-m", architecture, "--load-format", "dummy", *SHORT, "-f", "json")
    ours, theirs = pty.openpty()
    with started(*arguments, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                chunk = os.read(ours, 65536)
            except OSError:  # how Linux says that the other side is closed
                break
            if not chunk:
                break
            shown += chunk
        out = process.communicate(timeout=60)[0]
    os.close(ours)
    valid(out)
    assert b"1/2, kvgen" in shown
    with started(*arguments) as process:
        _, errors = process.communicate(timeout=60)
    assert "1/2, kvgen" not in errors
    assert "\x1b" not in errors
