"""The compiled decode step: equal to the uncached model, honest in its bytes, kept on disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Cli
from families import WINDOW, tiny_model
from oracle import full_logits, largest_difference
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from kvgen.cache.adapter import TransformersCache, specs_for
from kvgen.cache.slots import TokenSlots
from kvgen.cache.stepwise import Blocks
from kvgen.engine import compiling
from kvgen.engine.compiled import CompiledForward
from kvgen.engine.forward import Forward
from kvgen.engine.graphs import StepGraphs
from kvgen.engine.traced import BLOCK, CannotCompileError, attend
from kvgen.models import LoadedModel

FLOAT32 = 1e-4
IDS = [(7 * index) % 97 + 3 for index in range(2 * BLOCK + 6)]
# Full attention with grouped queries; all layers sliding; soft caps, half of the layers sliding;
# sinks and experts.
TYPES = ("llama", "mistral", "gemma2", pytest.param("gpt_oss", marks=pytest.mark.slow))

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder of these tests' own, so that the first of each model really compiles."""
    chosen = tmp_path_factory.mktemp("cache")
    before = os.environ.get("KVGEN_CACHE_DIR")
    os.environ["KVGEN_CACHE_DIR"] = str(chosen)
    yield chosen / "compiled"
    if before is None:
        del os.environ["KVGEN_CACHE_DIR"]
    else:
        os.environ["KVGEN_CACHE_DIR"] = before


def compiled(model_type: str) -> tuple[Any, CompiledForward]:
    model = tiny_model(model_type).requires_grad_(False)
    return model, CompiledForward(model, specs_for(model))


def new_cache(model: Any) -> TransformersCache:
    return TransformersCache(Blocks(BLOCK, block=BLOCK).make(specs_for(model)))


def fed(forward: Forward, cache: TransformersCache, ids: list[int]) -> torch.Tensor:
    return torch.stack([forward.cached([token], cache) for token in ids])


@pytest.mark.parametrize("model_type", TYPES)
def test_every_step_gives_what_the_model_gives_without_a_cache(model_type: str) -> None:
    model, forward = compiled(model_type)
    cache = new_cache(model)
    forward.extend(IDS[:3], cache)
    # Past the window, past a block and past two growths of the buffers.
    assert len(IDS) > max(2 * WINDOW + 1, 2 * BLOCK + 1)
    found = fed(forward, cache, IDS[3:])
    assert largest_difference(found, full_logits(model, IDS)[3:]) < FLOAT32
    assert cache.kv.bytes_used == cache.kv.bytes_formula(4)


def test_the_step_works_on_the_caches_own_buffers() -> None:
    model, forward = compiled("llama")
    cache, eager = new_cache(model), new_cache(model)
    plain = Forward(model)
    for one in (cache, eager):
        plain.extend(IDS[:5], one)
    fed(forward, cache, IDS[5:9])
    fed(plain, eager, IDS[5:9])
    for ours, theirs in zip(cache.kv.layers, eager.kv.layers, strict=True):
        for mine, other in zip(ours.pairs.views, theirs.pairs.views, strict=True):  # type: ignore[union-attr]
            assert torch.allclose(mine, other, atol=1e-5)
    # A model's own steps and compiled ones may take turns.
    last = [fed(plain, cache, IDS[9:10]), fed(forward, eager, IDS[9:10])]
    assert largest_difference(*last) < FLOAT32


def test_trim_fork_and_reset_work_after_compiled_steps() -> None:
    model, forward = compiled("llama")
    expected = full_logits(model, IDS[:12])
    cache = new_cache(model)
    forward.extend(IDS[:5], cache)
    fed(forward, cache, [90, 91, 92])
    cache.kv.trim(3)
    twin = TransformersCache(cache.kv.fork())
    fed(forward, twin, [93, 94])
    assert largest_difference(fed(forward, cache, IDS[5:12]), expected[5:]) < FLOAT32
    cache.kv.reset()
    forward.extend(IDS[:5], cache)
    assert largest_difference(fed(forward, cache, IDS[5:12]), expected[5:]) < FLOAT32


def test_a_second_start_compiles_nothing(folder: Path) -> None:
    _, first = compiled("llama")
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    _, second = compiled("llama")
    assert second.compilation.programs == first.compilation.programs == 3
    assert second.compilation.compiled == 0
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_a_damaged_program_is_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    files: list[Path] = []
    load = compiling.load_part
    monkeypatch.setattr(
        "kvgen.engine.compiled.load_part",
        lambda part, device: (files.append(part.file), load(part, device))[1],
    )
    compiled("llama")
    smallest = min(files, key=lambda path: path.stat().st_size)
    content = bytearray(smallest.read_bytes())
    smallest.write_bytes(b"not a program")
    assert not compiling._is_whole(smallest)
    content[len(content) // 2] ^= 1  # run, it could end the process without a word
    smallest.write_bytes(content)
    _, forward = compiled("llama")
    assert forward.compilation.compiled == 1


def test_nothing_of_the_compiled_step_stays_with_the_model() -> None:
    model, forward = compiled("llama")
    attention = model.config._attn_implementation
    cache = new_cache(model)
    forward.extend(IDS[:3], cache)
    fed(forward, cache, IDS[3:5])
    assert model.config._attn_implementation == attention
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("mamba", "has layers that keep more than pairs"),
        ("bloom", "does not attend through transformers' attention interface"),
        ("falcon", "cannot do without a mask"),
    ],
)
def test_a_model_that_cannot_be_compiled_says_why(model_type: str, reason: str) -> None:
    with pytest.raises(CannotCompileError, match=reason):
        compiled(model_type)


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "short_factor": [1.0] * 4,
    "long_factor": [3.0] * 4,
}


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {"rope_parameters": LONGROPE, "max_position_embeddings": 64}),
        pytest.param("roberta", {}, marks=pytest.mark.slow),
    ],
)
def test_what_no_program_can_hold_the_models_own_code_does(
    model_type: str, changes: dict[str, Any]
) -> None:
    """A rotary base that changes with the length; positions counted from what a cache holds."""
    model = tiny_model(model_type, **changes).requires_grad_(False)
    forward, plain = CompiledForward(model, specs_for(model)), Forward(model)
    caches = [new_cache(model), new_cache(model)]
    for cache in caches:
        plain.extend(IDS[:3], cache)
    found, expected = (
        fed(one, cache, IDS[3:24]) for one, cache in zip((forward, plain), caches, strict=True)
    )
    assert forward.compilation.programs == 2  # a layer and the head
    assert largest_difference(found, expected) < FLOAT32


def test_a_model_that_does_more_between_its_layers_is_not_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def doubled(self: Any, hidden: torch.Tensor, **more: Any) -> Any:
        return torch.nn.Module.__call__(self, 2 * hidden, **more)

    monkeypatch.setattr(LlamaDecoderLayer, "__call__", doubled)
    with pytest.raises(CannotCompileError, match="does more between its layers"):
        compiled("llama")


def test_a_wrong_program_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    right = compiling.load_part
    monkeypatch.setattr(
        "kvgen.engine.compiled.load_part",
        lambda part, device: (
            lambda inputs: [
                1.01 * each if each.is_floating_point() else each
                for each in right(part, device)(inputs)
            ]
        ),
    )
    with pytest.raises(CannotCompileError, match="computes something else when compiled"):
        compiled("llama")


def test_masked_slots_of_any_finite_content_change_nothing() -> None:
    torch.manual_seed(0)
    query, keys, values = (torch.randn(1, 2, *rest, 8) for rest in ((1,), (3, 4), (3, 4)))
    query = torch.randn(1, 4, 1, 8)
    seen = (torch.arange(12).view(3, 4) >= 1) & (torch.arange(12).view(3, 4) <= 6)
    result = attend(query, keys, values, seen, 0.3, softcap=2.0, sinks=torch.randn(4) * 0)
    for group in range(2):
        flat = [x[0, group].reshape(12, 8)[1:7].double() for x in (keys, values)]
        for head in (2 * group, 2 * group + 1):
            scores = (2 * torch.tanh(flat[0] @ query[0, head, 0].double() * 0.3 / 2)).exp()
            expected = scores @ flat[1] / (scores.sum() + 1)
            assert torch.allclose(result[0, 0, head].double(), expected, atol=1e-6)
    keys[:, :, 2], values[:, :, 2] = 1e4, -1e4
    again = attend(query, keys, values, seen, 0.3, softcap=2.0, sinks=torch.zeros(4))
    assert torch.equal(result, again)


def test_generate_says_that_its_step_is_compiled(cli: Cli, tiny_folder: Path) -> None:
    line = ("generate", "Time flies", "-m", tiny_folder, "-n", "5", "--compile", "--ignore-eos")
    first, second, plain = cli(*line), cli(*line), cli(*[part for part in line if part != line[-2]])
    assert first.returncode == second.returncode == 0, first.stderr
    assert first.stdout == second.stdout == plain.stdout
    assert "compiled now, ready in" in first.stderr
    assert "compiled before, ready in" in second.stderr
    assert "identical" in second.stderr
    assert "compiled step" not in plain.stderr


def test_what_is_unpacked_does_not_stay(
    process: Cli, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    done = process("generate", "Time", "-m", tiny_folder, "-n", "3", "--compile")
    assert "compiled step: 3 programs" in done.stderr
    assert not [*tmp_path.glob("aotinductor*"), *tmp_path.glob("kvgen-*")]


def test_compiled_and_own_steps_read_each_others_prompt_caches(
    cli: Cli, tiny_folder: Path, tmp_path: Path
) -> None:
    line = (
        "generate",
        "-m",
        tiny_folder,
        "-n",
        "5",
        "--ignore-eos",
        "--prompt-cache",
        tmp_path / "a",
    )
    first = cli(*line, "Time flies", "--compile")
    assert "compiled step" in first.stderr
    checked = cli("cache", "verify", tmp_path / "a", "-m", tiny_folder)
    assert checked.returncode == 0, checked.stderr
    plain = cli(*line, "Time flies")
    assert "10 tokens submitted, 9 reused" in plain.stderr
    assert plain.stdout == first.stdout
    cli("cache", "save", "Time f", tmp_path / "b", "-m", tiny_folder)
    longer = cli(*line[:-1], tmp_path / "b", "Time flies", "--compile")
    assert "10 tokens submitted, 6 reused" in longer.stderr
    assert longer.stdout == first.stdout
    assert "identical" in longer.stderr


def test_compare_takes_the_compiled_step_as_a_contestant(cli: Cli, tiny_folder: Path) -> None:
    import json

    size = ("--prompt-tokens", "8", "-n", "4", "-r", "2", "--format", "json")
    done = cli("compare", "-m", tiny_folder, "--compile", *size)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [one["name"] for one in document["contestants"]] == ["kvgen", "kvgen compiled"]
    assert document["contestants"][0]["compilation"] is None
    assert document["contestants"][1]["compilation"]["programs"] == 3
    assert document["rows"][0]["results"][1]["agreement"]["verdict"] == "exact"


def test_without_a_compiler_there_is_one_line(
    cli: Cli, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", _none)
    done = cli("generate", "a", "-m", tiny_folder, "-n", "2", "--compile")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("kvgen: --compile needs a C++ compiler")


def _none() -> str:
    raise RuntimeError("no compiler")


def test_a_cache_folder_that_is_a_file_is_one_line(
    cli: Cli, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVGEN_CACHE_DIR", str(tiny_folder / "config.json"))
    done = cli("generate", "a", "-m", tiny_folder, "-n", "2", "--compile")
    assert done.returncode == 2
    assert "kvgen: cannot keep the compiled step in" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("other", [("--no-cache",), ("--cache", "int8"), ("--cache", "exact")])
def test_compiling_needs_the_cache_that_grows_in_steps(cli: Cli, other: tuple[str, ...]) -> None:
    done = cli("generate", "a", "--compile", *other)
    assert done.returncode == 2
    assert "leave out" in done.stderr


@pytest.mark.real
@pytest.mark.slow
def test_the_real_model_is_compiled_exactly(smollm: LoadedModel) -> None:
    ids = [504, 3575, 282, 260] * 12
    forward = CompiledForward(smollm.model, specs_for(smollm.model))
    cache = new_cache(smollm.model)
    forward.extend(ids[:20], cache)
    found = fed(forward, cache, ids[20:])
    expected = full_logits(smollm.model, ids)[20:]
    assert largest_difference(found, expected) < FLOAT32 * float(expected.abs().max())


class Repeated(StepGraphs):
    """Runs again what a graph would replay, so that its inputs can be tested without CUDA."""

    def __init__(self, forward: CompiledForward, layers: int) -> None:
        super().__init__(layers, torch.device("cpu"))
        self.forward = forward
        self.steps: dict[Any, Any] = {}

    def capture(self, slots: Sequence[TokenSlots], step: Callable[[], torch.Tensor]) -> None:
        key = tuple(buffer.data_ptr() for each in slots for buffer in each.buffers())
        if self.steps.setdefault(key, step) is step:
            self.captured += 1
            step()

    def replay(self, slots: Sequence[TokenSlots]) -> torch.Tensor:
        key = tuple(buffer.data_ptr() for each in slots for buffer in each.buffers())
        with torch.inference_mode():
            return self.steps[key]().clone()


def test_a_graph_is_told_all_that_changes_from_step_to_step() -> None:
    model, forward = compiled("gemma2")
    forward._graphs = graphs = Repeated(forward, len(specs_for(model)))
    cache = new_cache(model)
    forward.extend(IDS[:3], cache)
    held = cache.kv.bytes_used
    found, captured = [], []
    for token in IDS[3:]:
        forward.ready(cache)
        captured.append(graphs.captured)
        found.append(forward.cached([token], cache))
    assert largest_difference(torch.stack(found), full_logits(model, IDS)[3:]) < FLOAT32
    assert cache.kv.bytes_used == cache.kv.bytes_formula(4) > held
    # One for each set of buffers, and always before a step, never within one.
    assert graphs.captured == captured[-1] < 8


@needs_cuda
def test_the_step_is_replayed_as_a_graph_on_cuda() -> None:
    model = tiny_model("llama").requires_grad_(False).to("cuda")
    forward = CompiledForward(model, specs_for(model))
    cache = new_cache(model)
    forward.extend(IDS[:3], cache)
    found = fed(forward, cache, IDS[3:])
    assert forward._graphs is not None
    assert forward._graphs.captured > 0
    assert largest_difference(found, full_logits(model, IDS)[3:]) < FLOAT32
