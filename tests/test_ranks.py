"""One model over several ranks: the same ids, its share of the bytes, and one common end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from conftest import Cli
from launch import Group
from tiny import save_tiny_llama
from transformers.distributed import DistributedConfig

from kvgen.cache.settings import Settings
from kvgen.cache.shares import share_of
from kvgen.cache.spec import FULL, LINEAR, LayerSpec, StateSpec
from kvgen.errors import UsageError
from kvgen.models import LoadedModel
from kvgen.report.document import schema

LAYERS, HIDDEN, VOCABULARY = 2, 32, 258
# Earlier releases keep embedding and output whole on every rank.
SHARES_TABLES = "tp_plan" in DistributedConfig.__dataclass_fields__
TENSOR = ("--parallel", "tensor", "--dtype", "float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose every matrix divides by two, with room for a long text."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    save_tiny_llama(
        folder,
        vocab_size=VOCABULARY,
        max_position_embeddings=1 << 20,
        initializer_range=0.5,
    )
    return folder


def parallel_document(done: Any, name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(done.stdout)
    jsonschema.Draft202012Validator(schema(name)).validate(document)
    return document


def test_two_ranks_sample_what_one_process_samples(cli: Cli, folder: Path, tmp_path: Path) -> None:
    line = ("generate", "-m", folder, "-n", "12", "--ignore-eos", "-f", "json")
    file = tmp_path / "out.json"
    sampled = ("--temperature", "0.8", "--compile")  # which ranks cannot, and say so
    with Group(2, *line, "-", *TENSOR, *sampled, "-o", file, stdin="Time") as group:
        first, second = group.wait()
    assert (first.returncode, second.returncode) == (0, 0), first.stderr
    assert (first.stdout, second.stdout, second.stderr) == ("", "", "")
    assert "all 2 ranks: KV cache" in first.stderr
    assert "not compiled: llama is divided over several devices or ranks" in first.stderr
    document = json.loads(file.read_text("utf-8"))
    jsonschema.Draft202012Validator(schema()).validate(document)
    assert document["check"]["verdict"] == "exact"

    seed = document["sampling"]["seed"]
    alone = json.loads(cli(*line, "Time", "--temperature", "0.8", "--seed", seed).stdout)
    ids = [step["token_id"] for step in document["steps"]]
    assert ids == [step["token_id"] for step in alone["steps"]]
    assert document["text"] == alone["text"]
    assert document["model"]["parameters"] == alone["model"]["parameters"]

    whole, ranks = alone["steps"][-1]["kv_bytes_used"], document["ranks"]
    assert ranks["kv_bytes_used"] == [whole // 2, whole // 2]
    assert ranks["kv_bytes_formula"] == whole // 2 == document["kv_bytes_formula"]
    # Norms are whole on every rank, and so are rotary frequencies, kept twice for heads of 8.
    twice = (2 * LAYERS + 1) * HIDDEN * 4 + 2 * 4 * 4
    if not SHARES_TABLES:
        twice += 2 * VOCABULARY * HIDDEN * 4
    assert sum(ranks["weight_bytes"]) == alone["model"]["weight_bytes"] + twice

    held = document["steps"][-1]["cached_tokens"]
    size = cli("size", folder, "--ranks", "2", "--context", held, "-f", "json")
    (row,) = json.loads(size.stdout)["rows"]
    assert row["kv_bytes"] == ranks["kv_bytes_used"][0]


def test_compare_says_what_went_to_communication(folder: Path) -> None:
    line = ("compare", "-m", folder, "--prompt-tokens", "12", "-n", "4", "-r", "2", "-f", "json")
    with Group(2, *line, *TENSOR, "--no-cache", "--against", "generate") as group:
        first, second = group.wait()
    assert (first.returncode, second.returncode) == (0, 0), first.stderr
    assert (second.stdout, second.stderr) == ("", "")
    document = parallel_document(first, "compare-1")
    kvgen, uncached, generate = document["rows"][0]["results"]
    assert uncached["agreement"]["verdict"] == generate["agreement"]["verdict"] == "exact"
    assert generate["communication"] is None
    found = kvgen["communication"]
    assert 0 < found["share"] < 1
    # Two sums per layer; where tables are shared out, one for the embedding, then all logits.
    assert found["collectives"] == 2 * LAYERS + (2 if SHARES_TABLES else 0)
    sums = 2 * LAYERS + SHARES_TABLES
    logits = VOCABULARY // 2 if SHARES_TABLES else 0
    assert found["wire_bytes"] == (sums * HIDDEN + logits) * 4
    assert document["ranks"]["kv_bytes_used"] == [kvgen["kv_bytes_peak"]] * 2


@pytest.mark.real
@pytest.mark.slow
def test_three_ranks_under_torchrun_give_the_ids_of_one_process(smollm: LoadedModel) -> None:
    from kvgen.measure.run import GenerationOptions, GenerationRun

    run = GenerationRun(smollm, GenerationOptions("Time flies", 8, recompute="off", warmup=False))
    for _ in run.pieces():
        pass
    alone = run.finish()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    line = ["generate", "Time flies", "-n", "8", "--recompute", "off", "--no-warmup", "-f", "json"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "3", "-m", "kvgen", *line, *TENSOR, "--quiet"],
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr
    document = parallel_document(done, "generate-1")
    assert [s["token_id"] for s in document["steps"]] == [s.token_id for s in alone.steps]
    whole = alone.steps[-1].kv_bytes_used
    assert document["ranks"]["kv_bytes_used"] == [whole // 3] * 3
    assert document["model"]["parameters"] == alone.model.parameters


def test_heads_that_do_not_divide_end_all_ranks_before_loading(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path, num_key_value_heads=1)
    (tmp_path / "model.safetensors").unlink()  # whoever looked for it would say so
    with Group(2, "generate", "Time", "-m", tmp_path, *TENSOR) as group:
        first, second = group.wait()
    assert (first.returncode, second.returncode) == (2, 2)
    assert first.stderr == (
        "kvgen: 1 key/value heads cannot be shared out evenly over 2 ranks; use one of 1\n"
    )
    assert (second.stdout, second.stderr) == ("", "")


ENDLESS = ("-n", "100000", "--ignore-eos", "--no-warmup", "--recompute", "off", "--force")


@pytest.fixture
def talking(folder: Path) -> Iterator[Group]:
    """Two ranks that have begun to generate and would go on for a long time."""
    with Group(2, "generate", "Time", "-m", folder, *TENSOR, *ENDLESS) as group:
        assert group.first_text()
        yield group


def test_a_killed_rank_ends_the_run_with_an_error(talking: Group) -> None:
    talking.ranks[1].kill()
    first, _ = talking.wait(30)
    assert first.returncode == 1
    assert first.stderr.startswith("kvgen: another rank ended or did not answer")
    assert first.stderr.count("\n") == 1


def test_a_killed_first_rank_ends_the_others(talking: Group) -> None:
    talking.ranks[0].kill()
    _, second = talking.wait(30)
    assert second == (1, "", "")


def test_ctrl_c_on_one_rank_stops_all_at_the_same_token(talking: Group) -> None:
    talking.ranks[1].send_signal(signal.SIGINT)
    first, second = talking.wait(30)
    assert (first.returncode, second.returncode) == (130, 130)
    assert "(interrupted)" in first.stderr
    assert "all 2 ranks: KV cache" in first.stderr
    assert (second.stdout, second.stderr) == ("", "")


def test_torchrun_and_the_command_line_must_say_the_same(
    cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = cli("generate", "Time", "-m", folder, *TENSOR)
    assert alone.returncode == 2
    assert "--parallel tensor needs several ranks; start them with torchrun" in alone.stderr
    for name, value in (("RANK", 0), ("WORLD_SIZE", 2), ("MASTER_ADDR", "x"), ("MASTER_PORT", 1)):
        monkeypatch.setenv(name, str(value))
    for command in ("generate Time", "compare", "verify", "explain Time", "chat", "cache save a b"):
        done = cli(*command.split(), "-m", folder)
        assert (done.returncode, done.stdout) == (2, "")
        assert "torchrun started 2 ranks" in done.stderr
    monkeypatch.setenv("RANK", "one")
    assert "RANK and its kin must be numbers" in cli("generate", "Time").stderr


def test_only_pairs_are_shared_out() -> None:
    plain, state = LayerSpec(FULL, 8, 64, 64), LayerSpec(LINEAR, states=(StateSpec((4, 4)),))
    shares = share_of([plain, state], Settings({"num_attention_heads": 8}), 4)
    assert shares == [LayerSpec(FULL, 2, 64, 64), state]
    with pytest.raises(UsageError, match=r"16 query heads .* over 3 ranks; use one of 1, 2, 4, 8$"):
        share_of([plain, state], Settings({"num_attention_heads": 16}), 3)
    latent = LayerSpec(FULL, 1, 512, 64)
    whole = Settings({"num_attention_heads": 8, "kv_lora_rank": 512})
    assert share_of([latent], whole, 4) == [latent]
    with pytest.raises(UsageError, match=r"8 key/value heads .* over 3 ranks; use one of 1, 2, 4"):
        share_of([plain], Settings({}), 3)
    with pytest.raises(UsageError, match="9 query heads"):
        share_of([plain], Settings({"num_attention_heads": 9}), 8)


def test_the_plan_in_the_documentation_is_what_size_says(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(__file__).resolve().parent.parent
    monkeypatch.chdir(root)
    page = (root / "docs" / "scaling.md").read_text("utf-8")
    line = page.split("```sh\nkvgen size ", 1)[1].split("\n", 1)[0]
    shown = page.split("```text\nconfigs", 1)[1].split("```", 1)[0]
    assert cli("size", *line.split()).stdout.startswith(f"configs{shown}")


def test_tensor_parallel_on_cuda(folder: Path) -> None:
    found = torch.cuda.device_count()
    if found < 2:
        pytest.skip(f"needs 2 CUDA devices for NCCL; {found} here")
    with Group(2, "generate", "Time", "-m", folder, "-n", "4", "-f", "json", *TENSOR) as group:
        first, _ = group.wait()
    ranks = parallel_document(first, "generate-1")["ranks"]
    assert ranks["backend"] == "nccl"
    assert len(set(ranks["kv_bytes_used"])) == 1


def test_accelerate_is_asked_for_when_it_is_missing(
    cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvgen.models.spread.find_spec", lambda name: None)
    done = cli("generate", "Time", "-m", folder, "--device-map", "auto")
    assert done.returncode == 2
    assert 'pip install "kvgen[parallel]"' in done.stderr
