"""Malformed input, systematically: one clear line, the right exit code, and nothing left behind.

To add a case, add a row to one of the tables of ``malformed_*.py``.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from conftest import Cli
from malformed import Case, Place
from malformed_files import GGUFS, KEPT, REQUESTS, RESULTS, TOKENS
from malformed_lines import LINES, PROFILES, PROMPTS
from malformed_models import CONFIGS, TOKENIZERS, WEIGHTS_CASES
from models_gguf import GGUF_VOCAB, write_tiny_gguf
from tiny import save_tiny_llama

CASES = [
    *(*LINES, *PROMPTS, *PROFILES, *CONFIGS, *WEIGHTS_CASES, *TOKENIZERS),
    *(*GGUFS, *RESULTS, *TOKENS, *KEPT),
]


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("gguf")
    model = save_tiny_llama(folder, vocab_size=GGUF_VOCAB)
    write_tiny_gguf(folder / "m.gguf", model)
    return (folder / "m.gguf").read_bytes()


@pytest.fixture(scope="module")
def result(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    from kvgen.cli.main import run

    file = tmp_path_factory.mktemp("result") / "result.json"
    line = ["compare", "-m", str(tiny_folder), "-n", "2", "-r", "1", "--prompt-tokens", "4", "-q"]
    assert run([*line, "--no-warmup", "--export", str(file)]) == 0
    return dict(json.loads(file.read_text("utf-8")))


@pytest.fixture(scope="module")
def kept(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    from kvgen.cli.main import run

    file = tmp_path_factory.mktemp("kept") / "kept"
    assert run(["cache", "save", "Time", str(file), "-m", str(tiny_folder), "-q"]) == 0
    return file.read_bytes()


@pytest.fixture
def place(
    tmp_path: Path,
    tiny_folder: Path,
    gguf: bytes,
    result: dict[str, Any],
    kept: bytes,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Place:
    """The working directory of a case; kvgen's cache lies in it."""
    monkeypatch.setenv("KVGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()  # what making the model printed
    return Place(tmp_path, tiny_folder, gguf, result, kept)


def everything(folder: Path) -> dict[str, bytes]:
    """All files below, but for what kvgen's cache may keep: locks, hashes, the bandwidth."""
    kept = ("*.lock", "hashes.json", "bandwidth*.json")
    files = (path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in files
        if not any(path.match(pattern) for pattern in kept)
    }


@pytest.mark.parametrize("case", CASES, ids=[case.name or case.line for case in CASES])
def test_a_malformed_input_is_one_line_and_leaves_nothing(
    case: Case, place: Place, cli: Cli
) -> None:
    laid = str(case.lay(place)) if case.lay else ""
    before = everything(place.root)
    words = shlex.split(case.line)
    done = cli(*(word.replace("$M", str(place.tiny)).replace("$F", laid) for word in words))
    assert (done.returncode, done.stdout) == (case.code, ""), done.stderr
    assert done.stderr.startswith("kvgen: ")
    assert done.stderr.count("\n") == 1
    assert len(done.stderr) < 700
    assert case.says in done.stderr
    assert "internal error" not in done.stderr
    assert "Traceback" not in done.stderr
    assert everything(place.root) == before


@pytest.mark.parametrize(("request_line", "says"), REQUESTS, ids=[one[0] for one in REQUESTS])
def test_a_malformed_request_is_named_by_its_line_and_the_others_are_served(
    request_line: str, says: str, place: Place, cli: Cli
) -> None:
    good = '{"id": "good", "prompt": "x", "max_new_tokens": 1}'
    file = place.file("p.jsonl", f"{request_line}\n{good}\n".encode("utf-8", "surrogateescape"))
    done = cli("batch", file, "-m", place.tiny, "-q", "-b", "1")
    first, last = done.stderr.splitlines()
    assert done.returncode == 4
    assert first.startswith(f"kvgen: {file}:1: ")
    assert says in first
    assert last == "kvgen: 1 line was skipped; all others are done"
    assert [json.loads(line)["id"] for line in done.stdout.splitlines()] == ["good"]


def test_the_tables_hold_at_least_120_cases_of_different_names() -> None:
    names = {case.name or case.line for case in CASES}
    assert len(names) == len(CASES) >= 120


AT_THE_LIMIT = """
-n 127
-n 1 --temperature 0
-n 1 --temperature 1 --top-k 1
-n 1 --temperature 1 --top-k 99999
-n 1 --temperature 1 --top-p 1
-n 1 --temperature 1 --min-p 0
-n 1 --temperature 1 --min-p 1
-n 1 --temperature 1 --seed 0
-n 1 --temperature 1 --seed 9223372036854775807
-n 1 --cache-step 1
-n 1 --cache window:1
-n 1 --prefill-chunk 1
-n 1 --prefill-chunk 99999999999999999999
-n 1 --threads 1
-n 1 --stop ' '
"""


@pytest.mark.parametrize("options", AT_THE_LIMIT.strip().splitlines())
def test_a_number_at_its_limit_is_taken(options: str, cli: Cli, tiny_folder: Path) -> None:
    line = ["generate", "x", "-m", tiny_folder, "-q", "--no-warmup", "--recompute", "off"]
    done = cli(*line, *shlex.split(options))
    assert (done.returncode, done.stderr) == (0, "")


PROMPTS_THAT_ARE_TEXT = {
    "NUL bytes": "a\x00b",
    "right to left": "שלום עולם",
    "combining characters": "e\u0301\u0323",
    "a bidirectional override": "\u202eabc",
    "emoji joined": "👩‍👩‍👧🏳️‍🌈",
    "a literal replacement character": "a\ufffdb",
    "only special tokens": "<|end|><|end|>",
    "Rich markup": "[bold]x[/bold] :smile: [/]",
    "escape sequences": "\x1b[2J\x1b]52;c;ZXZpbA==\x07",
    "spaces": "   ",
}


@pytest.mark.parametrize("prompt", PROMPTS_THAT_ARE_TEXT.values(), ids=PROMPTS_THAT_ARE_TEXT)
def test_an_odd_text_is_a_prompt_as_it_stands(
    prompt: str, cli: Cli, tiny_folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "prompt"
    file.write_text(prompt, "utf-8")
    line = ("generate", "-m", tiny_folder, "-n", "1", "-f", "json", "-q", "--no-warmup")
    done = cli(*line, "--prompt-file", file)
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document["prompt"] == prompt
    # The tokenizer of the tests has one id for every byte.
    assert document["prompt_tokens"] == len(prompt.encode())
