"""``kvgen size``: what it says, from which sources, and what it refuses."""

from __future__ import annotations

import csv
import io
import json
import logging
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from architectures import FOLDER, NAMES, config_of, raw
from conftest import Cli

from kvgen.errors import InputError, ModelError, UsageError
from kvgen.measure.architecture import Architecture, read_architecture
from kvgen.measure.parameters import estimate_parameters
from kvgen.measure.size import SizeOptions, expands_latent, size_of
from kvgen.models.gguf_header import read_gguf
from kvgen.models.types import LoadOptions
from kvgen.report.document import schema

QWEN = FOLDER / "qwen3-8b.json"
GIB = 2**30


def document(cli: Cli, *arguments: str | Path) -> dict[str, object]:
    done = cli("size", *arguments, "--format", "json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found = json.loads(done.stdout)
    jsonschema.validate(found, schema("size-1"))
    assert isinstance(found, dict)
    return found


def test_the_formula_stands_with_the_models_own_numbers(cli: Cli) -> None:
    out = cli("size", QWEN).stdout
    formula = "2 × 36 layers × 8 KV heads × 128 head_dim × 2 bytes = 147,456 bytes per token"
    assert f"\n{formula}\n  (144.0 KiB)\n" in out
    row = next(line for line in out.splitlines() if line.startswith("32,768"))
    assert row.split() == ["32,768", "4.5", "GiB"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", ["text", "json", "csv", "markdown"])
def test_every_file_is_shown_in_every_format(cli: Cli, name: str, form: str) -> None:
    path = FOLDER / f"{name}.json"
    lists = ("--batch", "1,8", "--kv-dtype", "float16,int8,int4", "--context", "100,4k")
    if form == "json":
        found = document(cli, path, *lists)
        assert len(found["rows"]) == 12  # type: ignore[arg-type]
        return
    done = cli("size", path, *lists, "--format", form)
    assert (done.returncode, done.stderr) == (0, "")
    if form == "csv":
        rows = list(csv.DictReader(io.StringIO(done.stdout)))
        assert {row["kv_dtype"] for row in rows} == {"float16", "int8", "int4"}
    if form == "text":
        # After the first line, which begins with the path as it was given.
        assert max(map(len, done.stdout.splitlines()[1:])) <= 80


def test_bytes_are_those_of_batch_times_context(cli: Cli) -> None:
    found = document(cli, QWEN, "--context", "1k,32k", "--batch", "1,3", "--kv-dtype", "float16")
    bytes_of = {(r["context"], r["batch"]): r["kv_bytes"] for r in found["rows"]}  # type: ignore
    assert bytes_of == {
        (1024, 1): 1024 * 147_456,
        (1024, 3): 3 * 1024 * 147_456,
        (32768, 1): 32768 * 147_456,
        (32768, 3): 3 * 32768 * 147_456,
    }


def test_a_budget_gives_the_longest_context_that_still_fits(cli: Cli) -> None:
    budget = ("--budget", "18GiB", "--kv-dtype", "bfloat16", "--context", "4k")
    found = document(cli, QWEN, *budget)
    (fit,) = found["fits"]  # type: ignore[misc]
    weights = found["weight_bytes"]
    longest = fit["longest_context"]
    assert fit["limited_by"] == "memory"
    assert fit["kv_bytes"] == longest * 147_456
    # One token more would not fit: the working memory grows with it too.
    assert weights + fit["kv_bytes"] + fit["working_bytes"] <= 18 * GIB
    assert weights + fit["kv_bytes"] + fit["working_bytes"] + 147_456 + 8192 > 18 * GIB
    (row,) = found["rows"]  # type: ignore[misc]
    assert 1 <= row["largest_batch"] <= (18 * GIB - weights) // row["kv_bytes"]


def test_a_budget_below_the_weights_is_refused_with_both_numbers(cli: Cli) -> None:
    done = cli("size", QWEN, "--budget", "8GiB")
    assert done.returncode == 4
    assert "the weights alone are 16,380,854,272 bytes" in done.stderr
    assert "8,589,934,592" in done.stderr


def test_a_model_without_growth_is_limited_by_nothing_but_its_own_search(cli: Cli) -> None:
    found = document(cli, FOLDER / "mamba2-780m.json", "--budget", "8GiB")
    assert found["bytes_per_token"] == 0
    assert len({row["kv_bytes"] for row in found["rows"]}) == 1  # type: ignore[attr-defined]


def test_sliding_layers_may_be_counted_in_full(cli: Cli) -> None:
    path = FOLDER / "mistral-7b-v0.1.json"
    ours = document(cli, path, "--context", "32k")
    theirs = document(cli, path, "--context", "32k", "--as-if", "full")
    assert ours["rows"][0]["kv_bytes"] == 4_095 * 131_072  # type: ignore[index]
    assert theirs["rows"][0]["kv_bytes"] == 32_768 * 131_072  # type: ignore[index]
    assert "--as-if full" in " ".join(ours["notes"])  # type: ignore[arg-type]


def test_latent_attention_is_shown_in_both_forms_and_the_stored_one_marked(cli: Cli) -> None:
    found = document(cli, FOLDER / "deepseek-v3.json")
    both = {a["name"]: a for a in found["alternatives"]}  # type: ignore[attr-defined]
    assert both["compressed latent"]["bytes_per_token"] == 70_272
    assert both["expanded keys and values"]["bytes_per_token"] == 4_997_120
    stored = [a for a in both.values() if a["stored_here"]]
    assert [a["bytes_per_token"] for a in stored] == [found["bytes_per_token"]]


def test_the_marked_form_is_what_the_installed_model_hands_over() -> None:
    from architectures import small_model

    from kvgen.cache.adapter import specs_for

    (key_dim,) = {spec.key_dim for spec in specs_for(small_model("deepseek-v3"))}
    assert (key_dim == 16) == (not expands_latent("deepseek_v3"))  # else 16 + 16 rotary


def test_a_quantised_policy_has_its_own_formula_and_is_named(cli: Cli) -> None:
    # 2 x 12 layers x 12 heads x (64 codes + one minimum and scale of 2 bytes each)
    out = cli("size", FOLDER / "gpt2.json", "--cache", "int8").stdout
    assert "12 layers × 12 KV heads × codes and scales of int8 = 19,584 bytes per token" in out
    assert out.splitlines()[2] == "cache: int8"


def test_a_window_policy_stops_the_growth_and_says_what_it_does(cli: Cli) -> None:
    found = document(cli, QWEN, "--cache", "window:512,sink:4", "--context", "100,4k,32k")
    assert [row["kv_bytes"] for row in found["rows"]] == [  # type: ignore[attr-defined]
        100 * 147_456,
        516 * 147_456,
        516 * 147_456,
    ]
    assert "changes the model's output" in " ".join(found["notes"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--context", "4q"), 2, "cannot read '4q'"),
        (("--context", "0"), 2, "cannot read '0'"),
        (("--batch", "1,,2"), 2, "cannot read ''"),
        (("--budget", "much"), 2, "such as 24GiB"),
        (("--kv-dtype", "int5"), 2, "choose from float32, bfloat16, float16, int8, int4"),
        (("--kv-dtype", "int8", "--cache", "exact"), 2, "leave out --cache"),
        (("--cache", "windw:3"), 2, "unknown cache"),
        (("--format", "xml"), 2, "xml"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(
    cli: Cli, arguments: tuple[str, ...], code: int, message: str
) -> None:
    done = cli("size", QWEN, *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not readable JSON"),
        ("[]", "must hold a JSON object"),
        ("{}", "lacks model_type"),
        ('{"model_type": "llama"}', "lacks num_hidden_layers"),
        ('{"model_type": "llama", "num_hidden_layers": 2}', "lacks num_attention_heads"),
        (
            '{"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4}',
            "lacks hidden_size",
        ),
    ],
)
def test_a_broken_file_is_refused_by_the_field(
    cli: Cli, tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "broken.json"
    path.write_text(content, "utf-8")
    done = cli("size", path)
    assert (done.returncode, done.stdout) == (3, "")
    assert message in done.stderr
    assert str(path) in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_second_model_is_not_taken_for_a_prompt(cli: Cli) -> None:
    done = cli("size", QWEN, QWEN)
    assert (done.returncode, "quotes" in done.stderr) == (2, False)


def test_no_such_model_is_one_line(cli: Cli) -> None:
    for name in ("nowhere/at-all", "missing.json", "missing.gguf"):
        done = cli("size", name, "--offline")
        assert done.returncode == 3
        assert len(done.stderr.splitlines()) == 1


def test_a_folder_counts_its_weights_on_the_disk(tiny_folder: Path) -> None:
    found = read_architecture(LoadOptions(model=str(tiny_folder)))
    assert found.weight_bytes == (tiny_folder / "model.safetensors").stat().st_size
    assert found.dtype == "float32"


def test_a_hub_model_is_read_from_the_local_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path), raising=False)
    repository = tmp_path / "models--someone--model"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    (snapshot / "config.json").write_text(QWEN.read_text("utf-8"), "utf-8")
    index = {"metadata": {"total_size": 123_456}, "weight_map": {}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    found = read_architecture(LoadOptions(model="someone/model", offline=True))
    assert (found.weight_bytes, found.weight_source) == (
        123_456,
        "total in the safetensors index",
    )
    assert size_of(found, SizeOptions()).bytes_per_token == 147_456


def test_the_hub_librarys_retries_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import errors

    logger, heard = logging.getLogger("huggingface_hub.utils._http"), []

    def unreachable(*_: object, **__: object) -> str:
        heard.append(logger.isEnabledFor(logging.WARNING))
        raise errors.LocalEntryNotFoundError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(ModelError, match="someone/absent: neither a local folder"):
        read_architecture(LoadOptions(model="someone/absent"))
    assert heard == [False]
    assert logger.isEnabledFor(logging.WARNING)


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_estimated_within_one_percent(name: str) -> None:
    from kvgen.models.causal import build_skeleton

    model = build_skeleton(config_of(raw(name)), name)
    real = sum(parameter.numel() for parameter in model.parameters())
    estimate = estimate_parameters(raw(name))
    assert estimate is not None
    assert abs(estimate / real - 1) < 0.01


def test_weights_without_an_estimate_are_not_guessed(tmp_path: Path) -> None:
    strange = Architecture("strange", raw("qwen3-8b"))
    assert size_of(strange, SizeOptions()).weight_bytes is None
    with pytest.raises(UsageError, match="--budget needs"):
        size_of(strange, SizeOptions(budget=GIB))
    with pytest.raises(InputError, match="weights alone"):
        size_of(Architecture("x", raw("qwen3-8b"), weight_bytes=2 * GIB), SizeOptions(budget=GIB))


@pytest.mark.real
def test_a_gguf_header_says_what_its_conversion_says(smollm: object) -> None:
    from kvgen.models.names import find_default_gguf

    file = find_default_gguf()
    if file is None:
        pytest.skip("the weights package is not installed")
    fields, parameters = read_gguf(file, "x")
    config = smollm.config  # type: ignore[attr-defined]
    for name in ("num_hidden_layers", "hidden_size", "num_key_value_heads", "vocab_size"):
        assert fields[name] == getattr(config, name)
    assert parameters == sum(p.numel() for p in smollm.model.parameters())  # type: ignore


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF" + b"\xff" * 60, b"not one"])
def test_a_damaged_gguf_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match="not a whole GGUF file"):
        read_gguf(path, "x")


def test_size_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys\n"
        "from kvgen.cli.main import run\n"
        f"assert run(['size', {str(QWEN)!r}, '--budget', '24GiB']) == 0\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)
