"""The bytes a step must read, and the machine's bandwidth: measured once and remembered."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from families import tiny_model

from kvgen.measure import roofline
from kvgen.measure.roofline import WeightReads, measured_bandwidth

CPU = torch.device("cpu")
ROW = 64 * 4  # bytes of one embedding row: hidden size 64 in float32
ROWS = 128


def bytes_of(*tensors: torch.Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def test_an_embedding_of_its_own_is_read_a_row_per_token() -> None:
    model = tiny_model("llama")
    everything = bytes_of(*model.parameters(), *model.buffers())
    reads = WeightReads(model)
    assert reads.total == everything
    assert reads.per_forward(1) == everything - (ROWS - 1) * ROW
    assert reads.per_forward(5) == everything - (ROWS - 5) * ROW
    assert reads.per_forward(ROWS) == reads.per_forward(1000) == everything


def test_an_embedding_tied_to_the_output_is_counted_once_and_read_whole() -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    names = dict(model.named_parameters(remove_duplicate=True))
    assert "lm_head.weight" not in names
    reads = WeightReads(model)
    assert reads.total == bytes_of(*names.values(), *model.buffers())
    assert reads.per_forward(1) == reads.total


def test_of_a_mixture_only_the_chosen_experts_are_read() -> None:
    model = tiny_model("mixtral")  # 2 of 4 experts for each token
    experts = [p for name, p in model.named_parameters() if ".experts." in name]
    reads = WeightReads(model)
    assert bytes_of(*experts) > reads.total / 2
    one_token = reads.total - (ROWS - 1) * ROW - bytes_of(*experts) // 2
    assert reads.per_forward(1) == one_token
    # Two tokens may choose all four between them.
    assert reads.per_forward(2) == reads.total - (ROWS - 2) * ROW


def test_half_the_bytes_in_half_precision() -> None:
    model = tiny_model("llama").to(torch.bfloat16)
    parameters = sum(p.numel() for p in model.parameters())
    assert WeightReads(model).total == 2 * parameters + bytes_of(*model.buffers())


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The speeds that measuring would find, taken from the front."""
    speeds = [11e9, 22e9, 33e9]
    monkeypatch.setattr(roofline, "_probe", lambda _device: speeds.pop(0))
    monkeypatch.setattr(roofline, "is_busy", lambda: False)
    return speeds


def test_what_was_measured_beside_other_work_is_not_remembered(
    probes: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(roofline, "is_busy", lambda: True)
        assert measured_bandwidth(CPU, 2, tmp_path) == 11e9
    assert measured_bandwidth(CPU, 2, tmp_path) == 22e9
    assert measured_bandwidth(CPU, 2, tmp_path) == 22e9
    assert probes == [33e9]


def test_the_bandwidth_is_measured_once_and_remembered(probes: list[float], tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there" / "yet"
    assert measured_bandwidth(CPU, 2, folder) == 11e9
    assert measured_bandwidth(CPU, 2, folder) == 11e9
    assert len(probes) == 2
    assert list(json.loads((folder / "bandwidth.json").read_text()).values()) == [11e9]


def test_another_number_of_threads_is_measured_for_itself(
    probes: list[float], tmp_path: Path
) -> None:
    assert measured_bandwidth(CPU, 2, tmp_path) == 11e9
    assert measured_bandwidth(CPU, 1, tmp_path) == 22e9
    assert measured_bandwidth(CPU, 2, tmp_path) == 11e9
    assert probes == [33e9]


def test_it_is_remembered_in_kvgens_cache_folder(
    probes: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvgen.storage import cache_root

    monkeypatch.setenv("KVGEN_CACHE_DIR", str(tmp_path / "cache"))
    assert measured_bandwidth(CPU, 1, cache_root()) == 11e9
    assert (tmp_path / "cache" / "bandwidth.json").is_file()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"a": "fast"}',
        b'{"a": null}',
        b'{"a": [1]}',
        b"[" * 100_000,
    ],
)
def test_a_damaged_memory_is_measured_anew_and_replaced(
    content: bytes, probes: list[float], tmp_path: Path
) -> None:
    (tmp_path / "bandwidth.json").write_bytes(content)
    assert measured_bandwidth(CPU, 2, tmp_path) == 11e9
    assert measured_bandwidth(CPU, 2, tmp_path) == 11e9
    assert len(probes) == 2


@pytest.mark.parametrize("speed", ["0", "-1e9", "NaN", "Infinity", "true"])
def test_a_remembered_speed_that_cannot_be_is_measured_anew(
    speed: str, probes: list[float], tmp_path: Path
) -> None:
    measured_bandwidth(CPU, 2, tmp_path)
    file = tmp_path / "bandwidth.json"
    file.write_text(file.read_text().replace("11000000000.0", speed))
    assert measured_bandwidth(CPU, 2, tmp_path) == 22e9
    assert probes == [33e9]


def test_a_folder_that_cannot_be_written_only_costs_the_memory(
    probes: list[float], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    assert measured_bandwidth(CPU, 2, tmp_path / "file" / "below") == 11e9
    assert measured_bandwidth(CPU, 2, tmp_path / "file" / "below") == 22e9


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_only_costs_the_memory(probes: list[float], tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        assert measured_bandwidth(CPU, 2, tmp_path) == 11e9
    finally:
        tmp_path.chmod(0o700)
    assert list(tmp_path.iterdir()) == []


def test_without_a_folder_nothing_is_remembered(probes: list[float]) -> None:
    assert measured_bandwidth(CPU, 2, None) == 11e9
    assert measured_bandwidth(CPU, 2, None) == 22e9


def test_a_machine_without_the_memory_for_it_has_no_bandwidth(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(_device: object) -> float:
        raise RuntimeError("not enough memory: you tried to allocate 536870912 bytes")

    monkeypatch.setattr(roofline, "_probe", fail)
    assert measured_bandwidth(CPU, 2, tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_the_real_probe_finds_a_possible_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "_PROBE_BYTES", 4 * 1024 * 1024)
    assert 1e7 < (measured_bandwidth(CPU, 1, None) or 0) < 1e14
