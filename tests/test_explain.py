"""``kvgen explain``: its counts against lengths, its proofs against doubles, its two renderings."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from conftest import Cli
from families import WINDOW
from loaded import loaded_tiny
from rich.cells import cell_len

from kvgen.cache.adapter import specs_for
from kvgen.cache.slots import TokenSlots
from kvgen.cache.spec import FULL, SLIDING, LayerSpec
from kvgen.errors import InputError, UsageError
from kvgen.measure.boundary import context_of
from kvgen.measure.explain import ExplainOptions, ExplanationRun
from kvgen.measure.explanation import Explanation
from kvgen.report.document import schema, to_json
from kvgen.report.explain_page import explanation_document
from kvgen.report.explain_text import explanation_text
from kvgen.report.grid import equal_runs, kept

PROMPT, P = "Time flies", 10
N = 6
ROOT = Path(__file__).parent.parent


def newest(model_type: str) -> Any:
    """A type that the oldest supported transformers lacks or caches in its own way."""
    return pytest.param(model_type, marks=pytest.mark.newest)


RECURRENT = (newest("mamba2"), newest("qwen3_next"))


def explained(model_type: str, n: int = N, **options: Any) -> Explanation:
    options.setdefault("timings", False)
    run = ExplanationRun(loaded_tiny(model_type), ExplainOptions(PROMPT, n, **options))
    return run.explain()


def cells(record: Explanation, kind: str, twin: bool = False) -> int:
    rows = [stage.twin.cells if twin else stage.cells for stage in record.stages]
    return sum(row.count(kind) for row in rows)


# Counts


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", *RECURRENT])
@pytest.mark.parametrize("n", [1, 2, 7])
def test_the_grid_counts_what_follows_from_lengths_alone(model_type: str, n: int) -> None:
    record = explained(model_type, n)
    growing = sum(P + i for i in range(n))
    assert record.work == type(record.work)(P + n - 1, growing, growing - (P + n - 1))
    assert cells(record, "computed") == P + n - 1
    again = cells(record, "recomputed", twin=True)
    assert again + cells(record, "computed", twin=True) == growing
    assert record.stages[-1].twin.repeated_so_far == again == growing - (P + n - 1)
    assert {len(s.cells) for s in record.stages} == {P + n - 1}
    assert [s.tokens for s in record.stages] == [P] + [1] * (n - 1)
    assert [s.twin.tokens for s in record.stages] == [P + i for i in range(n)]


def test_a_window_reads_w_minus_one_stored_pairs_and_evicts_the_rest() -> None:
    record = explained("gemma3_text")
    assert record.layers[record.layer].window == WINDOW
    steps = record.stages[1:]
    assert [s.attention.stored_read for s in steps] == [WINDOW - 1] * len(steps)
    starts = range(P, P + N - 1)
    assert [s.cells.count("read") for s in steps] == [WINDOW - 1] * len(steps)
    assert [s.cells.count("evicted") for s in steps] == [s - (WINDOW - 1) for s in starts]
    ends = [(s.layers[record.layer].first_position, s.first_position + 1) for s in steps]
    assert all(end - (first or 0) == WINDOW - 1 for first, end in ends)


# One type for each kind of layer, and for each mixture that matters.
KINDS = {
    "llama": "full_attention",
    "gemma3_text": "sliding_attention",
    "llama4_text": "chunked_attention",
    "mamba2": "linear_attention",
    "lfm2": "conv",
    "falcon_h1": "hybrid",
    "zaya": "hybrid_sliding",
    "glm_moe_dsa": "indexed_attention",
    "minimax_m3_vl_text": "minimax_m3_sparse",
    "deepseek_v4": "compressed_sparse_attention",
    "gemma3n_text": "dummy",
}


@pytest.mark.newest
@pytest.mark.parametrize(("model_type", "kind"), KINDS.items())
def test_every_kind_of_layer_is_explained(model_type: str, kind: str) -> None:
    loaded = loaded_tiny(model_type)
    kinds = [spec.kind for spec in specs_for(loaded.model)]
    record = ExplanationRun(
        loaded, ExplainOptions(PROMPT, N, layer=kinds.index(kind), timings=False)
    ).explain()
    assert record.changed == []
    assert record.disagreeing == []
    assert record.training is not None
    assert record.training.agrees
    assert (record.work.cached, record.work.uncached) == (P + N - 1, sum(range(P, P + N)))
    text = explanation_text(record)
    assert kind in text
    assert max(cell_len(line) for line in text.splitlines()) <= 80
    for stage in record.stages[1:]:
        layer = stage.layers[record.layer]
        assert (layer.unchanged is True) == record.layers[record.layer].keeps.startswith(
            ("a key", "the last")
        )
        assert layer.bytes_used == 0 if kind == "dummy" else layer.stored


def test_a_full_layer_reads_every_earlier_pair() -> None:
    record = explained("llama")
    assert [s.attention.keys_read for s in record.stages] == [P + i for i in range(N)]
    assert cells(record, "evicted") == 0
    assert cells(record, "read") == sum(P + i for i in range(N - 1))


@pytest.mark.newest
def test_a_recurrent_layer_keeps_a_state_and_no_pairs() -> None:
    record = explained("mamba2")
    for stage in record.stages[1:]:
        assert stage.cells.count("state") == stage.first_position
        assert stage.attention.keys_read is None
        assert {layer.first_position for layer in stage.layers} == {None}
        assert all(layer.sha256_before != layer.sha256_after for layer in stage.layers)
    assert len({stage.kv_bytes_used for stage in record.stages}) == 1
    text = explanation_text(record)
    assert "a state of fixed size that sums up every" in text
    assert "No pairs are stored" in text


@pytest.mark.parametrize("model_type", ["llama", "bloom", "gemma3_text", "xglm"])
def test_queries_keys_and_values_are_seen_as_they_are(model_type: str) -> None:
    """Whether attention is torch's own or the model's, folded or not."""
    record = explained(model_type, 3, layer=1)
    config = loaded_tiny(model_type).config
    heads, facts = config.num_attention_heads, record.layers[1]
    for stage in record.stages:
        assert stage.attention.query_shape is not None
        assert stage.attention.query_shape[:3] == [1, heads, stage.tokens]
        assert stage.attention.key_shape is not None
        assert stage.attention.key_shape[:3] == [1, facts.num_key_value_heads, stage.tokens]
        assert stage.attention.query_shape[3] == stage.attention.key_shape[3]


def test_operations_are_those_of_the_matrices() -> None:
    """Two per weight of each matrix that a token meets, and the attention's own."""
    record = explained("llama", 4)
    model = loaded_tiny("llama").model
    weights = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed_tokens" not in n]
    per_token = 2 * sum(weight.numel() for weight in weights)
    config = model.config
    for stage in record.stages[1:]:
        width = config.num_attention_heads * config.head_dim
        attention = config.num_hidden_layers * 2 * 2 * width * stage.twin.tokens
        assert stage.attention_operations == attention
        # Some releases also make the rotary angles by a product.
        assert 0 <= stage.operations - per_token - attention <= 2 * config.head_dim


# Proofs


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "deepseek_v3", newest("zaya")])
def test_earlier_pairs_stay_the_same_to_the_bit(model_type: str) -> None:
    record = explained(model_type)
    assert record.changed == []
    assert record.disagreeing == []
    assert record.training is not None
    assert record.training.agrees
    for stage in record.stages[1:]:
        layer = stage.layers[record.layer]
        assert layer.earlier > 0
        assert layer.sha256_before == layer.sha256_after


def alter_an_old_pair(patch: pytest.MonkeyPatch, layer_slots: int = 0) -> None:
    """The fifth update also moves one number of the oldest pair by the least step."""
    original, calls = TokenSlots.update, [0]

    def update(self: TokenSlots, *news: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = original(self, *news)
        calls[0] += 1
        if calls[0] == 5:
            oldest = self._buffers[0][0, 0, self._start]
            oldest[0] = torch.nextafter(oldest[0], torch.tensor(9.0))
        return found

    patch.setattr(TokenSlots, "update", update)


def test_the_checksum_fails_when_a_double_alters_one_bit_of_an_old_pair(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alter_an_old_pair(monkeypatch)
    record = explained("llama")  # three layers, so the fifth update is step 1 of layer 1
    assert record.changed == [(1, 1)]
    assert record.disagreeing == []  # no logit tells; only the checksum does
    assert "EARLIER PAIRS CHANGED in layer 1" in explanation_text(record)


def test_a_changed_pair_exits_5(
    cli: Cli, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alter_an_old_pair(monkeypatch)  # two layers: step 2 of layer 0
    done = cli("explain", "Time", "-m", tiny_folder, "--no-timings", "--quiet")
    assert done.returncode == 5
    assert done.stderr == "kvgen: stage 2 changed earlier pairs of layer 0\n"


def test_the_training_check_is_the_parallel_forward() -> None:
    record = explained("llama", 5)
    loaded = loaded_tiny("llama")
    ids = [token.id for token in record.tokens]
    logits = loaded.model(torch.tensor([ids]), use_cache=False).logits[0]
    assert record.training is not None
    assert record.training.positions == P + 5 - 1
    assert [int(row.argmax()) for row in logits[P - 1 : -1]] == ids[P:]


# The boundary


def test_the_boundary_is_the_last_steps_account() -> None:
    record = explained("llama")
    it, last = record.boundary, record.stages[-1]
    assert it is not None
    assert it.saved_operations == last.twin.operations - last.operations > 0
    assert it.kv_bytes_read == last.kv_bytes_used
    assert it.operations_per_s is None
    per_token = sum(layer.bytes_per_token for layer in record.layers)
    assert it.kv_bytes_per_token == per_token
    assert it.kv_equals_weights_at == -(-it.weight_bytes_read // per_token)


@pytest.mark.parametrize(
    ("specs", "size", "tokens"),
    [
        ([LayerSpec(FULL, 1, 1, 1)], 80, 10),
        ([LayerSpec(FULL, 1, 1, 1)], 81, 11),
        ([LayerSpec(FULL, 1, 1, 1)], 1, 1),
        ([LayerSpec(SLIDING, 1, 1, 1, window=4)], 24, 3),
        ([LayerSpec(SLIDING, 1, 1, 1, window=4)], 25, None),
        ([LayerSpec(FULL, 1, 1, 1), LayerSpec(SLIDING, 1, 1, 1, window=4)], 104, 10),
    ],
)
def test_the_context_at_which_a_cache_reaches_a_size(
    specs: list[LayerSpec], size: int, tokens: int | None
) -> None:
    assert context_of(specs, size, itemsize=4) == tokens


def test_one_token_leaves_nothing_to_account_for() -> None:
    record = explained("llama", 1)
    assert record.boundary is None
    assert "no decode step" in explanation_text(record)


# Timings


def test_both_paths_are_timed_at_every_stage_and_some_longer_prefixes() -> None:
    loaded = loaded_tiny("llama", limit=70)
    record = ExplanationRun(loaded, ExplainOptions(PROMPT, 3)).explain()
    points = [(p.tokens, p.source) for p in record.curve]
    assert points == [
        *((P + i, "stage") for i in range(3)),
        *((tokens, "sweep") for tokens in (16, 32, 64)),
    ]
    assert all(p.cached_s > 0 and p.uncached_s > 0 for p in record.curve)
    assert all(p.max_abs_logit_difference <= record.tolerance for p in record.curve)
    assert all(s.latency_s and s.twin.latency_s for s in record.stages)
    assert record.boundary is not None
    assert record.boundary.operations_per_s


# What is refused


def test_a_layer_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match="layers 0 to 2"):
        explained("llama", layer=3)


def test_more_than_the_context_holds_is_refused() -> None:
    with pytest.raises(InputError, match="context of 12"):
        ExplanationRun(loaded_tiny("llama", limit=12), ExplainOptions(PROMPT, 4))


# Text


@pytest.mark.parametrize(("model_type", "n"), [("llama", 40), ("gemma3_text", 33)])
def test_no_line_is_wider_than_80_columns(model_type: str, n: int) -> None:
    text = explanation_text(explained(model_type, n))
    assert max(cell_len(line) for line in text.splitlines()) <= 80


def test_model_text_cannot_act_on_the_terminal() -> None:
    record = explained("llama", 3)
    for token in record.tokens:
        token.token = "\x1b[31m漢\n\u202e" * 20
    record.stages[0].choices[0].token = "\x9b31m"
    record.model.name = "evil\x1b]0;owned\x07"
    text = explanation_text(record)
    assert not set(text) & set("\x1b\x9b\x07\u202e")


def test_the_grid_is_drawn_as_the_record_says() -> None:
    lines = explanation_text(explained("gemma3_text", 3)).splitlines()
    drawn = [line.split() for line in lines if re.match(r"  (prefill|step) ", line)]
    assert drawn == [
        ["prefill", "##########..", "##########.."],
        ["step", "1", "xxx=======#.", "RRRRRRRRRR#."],
        ["step", "2", "xxxx=======#", "RRRRRRRRRRR#"],
    ]
    assert "  0-4       xxxxx=======   sliding_attention" in lines
    assert "  5         ============   full_attention" in lines


def test_long_sequences_lose_their_middle() -> None:
    assert kept(5, 5) == [0, 1, 2, 3, 4]
    assert kept(9, 5) == [0, 1, None, 7, 8]
    assert equal_runs(["a", "a", "b", "a"]) == [(0, 2), (2, 3), (3, 4)]


# Data


@pytest.mark.parametrize("model_type", ["gemma3_text", *RECURRENT])
def test_the_document_fits_its_schema(model_type: str) -> None:
    document = json.loads(to_json(explanation_document(explained(model_type, 3))))
    jsonschema.Draft202012Validator(schema("explain-1")).validate(document)


def test_stdout_is_one_document(cli: Cli, tiny_folder: Path) -> None:
    done = cli("explain", "Time", "-m", tiny_folder, "-n", "3", "-f", "json")
    document = json.loads(done.stdout)
    jsonschema.Draft202012Validator(schema("explain-1")).validate(document)
    assert document["prompt"] == "Time"
    assert document["work"] == {"cached": 6, "uncached": 15, "repeated": 9}


# The documentation

MEASURED = {
    r"\d+(\.\d+)? (µs|ms|s)\b": "<time>",
    r"\d(\.\d)?e-\d\d": "<difference>",
    r"[0-9a-f]{12} = [0-9a-f]{12}": "<checksum> = <checksum>",
    r"reads [\d.]+ GB/s, computes [\d.]+ G ": "reads <speed> GB/s, computes <speed> G ",
    r"up to about [\d,]+ tokens": "up to about <few> tokens",
}


def masked(text: str) -> list[str]:
    """Lines with what differs from machine to machine replaced."""
    for pattern, name in MEASURED.items():
        text = re.sub(rf"(?<=\s) +(?={pattern})", "", re.sub(pattern, name, text))
        text = re.sub(rf" +{name}", f" {name}", text)
    return text.splitlines()


@pytest.mark.real
def test_the_documentation_shows_what_the_command_prints(cli: Cli) -> None:
    page = (ROOT / "docs" / "explain.md").read_text("utf-8")
    shown = page.split('$ kvgen explain "Time flies" -n 3\n', 1)[1].split("```", 1)[0]
    done = cli("explain", "Time flies", "-n", "3", "--quiet")
    assert done.returncode == 0
    assert masked(shown) == masked(done.stdout)
    assert any("<checksum>" in line for line in masked(shown))


def test_the_page_and_the_text_need_a_file_each(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "both.html"
    done = cli("explain", "hi", "--html", file, "-o", file)
    assert (done.returncode, "name one file" in done.stderr, file.exists()) == (2, True, False)
