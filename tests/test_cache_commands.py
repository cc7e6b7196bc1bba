"""``kvgen cache`` and ``generate --prompt-cache``: what they say and what they refuse."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from conftest import Cli
from tiny import save_tiny_llama

from kvgen.cache.disk import (
    CacheFile,
    open_cache_file,
    write_cache_file,
)
from kvgen.cache.fingerprint import Fingerprint
from kvgen.report.document import schema


@pytest.fixture
def kept(cli: Cli, tiny_folder: Path, tmp_path: Path) -> Path:
    path = tmp_path / "time.kv"
    done = cli("cache", "save", "Time flies", path, "-m", tiny_folder)
    assert (done.returncode, done.stdout) == (0, "")
    assert "prompt: 10 tokens submitted, 0 reused, 10 computed" in done.stderr
    assert "written: 10 tokens" in done.stderr
    return path


def test_a_pipe_is_not_waited_for(cli: Cli, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    done = cli("cache", "show", tmp_path / "pipe")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "cannot hold a cache: give a file" in done.stderr


def test_a_saved_prompt_can_mean_special_tokens(
    cli: Cli, tiny_folder: Path, tmp_path: Path
) -> None:
    line = ("cache", "save", "a<|end|>", tmp_path / "kept", "-m", tiny_folder)
    assert "prompt: 8 tokens submitted" in cli(*line).stderr
    assert "prompt: 2 tokens submitted" in cli(*line, "--parse-special").stderr


def generate(cli: Cli, folder: Path, file: Path, *more: str) -> Any:
    line = ("generate", "Time flies by", "-m", folder, "-n", "3", "--ignore-eos", *more)
    return cli(*line, "--prompt-cache", file)


def test_generate_says_what_it_reused_in_text_and_in_json(
    cli: Cli, tiny_folder: Path, kept: Path
) -> None:
    copy = shutil.copy(kept, kept.with_name("copy.kv"))
    done = generate(cli, tiny_folder, kept)
    assert "prompt: 13 tokens submitted, 10 reused, 3 computed; " in done.stderr
    assert "of prefill saved" in done.stderr
    assert "read " in done.stderr
    assert "written: 15 tokens" in done.stderr
    document = json.loads(generate(cli, tiny_folder, Path(copy), "-f", "json").stdout)
    jsonschema.Draft202012Validator(schema()).validate(document)
    assert document["text"] == done.stdout
    reuse = document["reuse"]
    assert [reuse[name] for name in ("submitted", "matched", "reused", "computed")] == [
        *(13, 10, 10, 3)
    ]
    assert document["kept"]["tokens"] == 15
    assert document["check"]["verdict"] == "exact"
    totals = document["totals"]
    parts = totals["tokenize_s"] + reuse["read_s"] + totals["prefill_s"]
    assert totals["ttft_s"] == pytest.approx(parts)


def test_json_lines_give_the_receipt_before_the_first_token(
    cli: Cli, tiny_folder: Path, kept: Path
) -> None:
    done = generate(cli, tiny_folder, kept, "-f", "jsonl", "--prompt-cache-ro")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines[0]["reuse"]["reused"] == 10
    assert "kept" in lines[-1]
    assert lines[-1]["kept"] is None


def test_show_needs_no_model_and_says_tokens_layers_bytes_and_fingerprint(kept: Path) -> None:
    code = (
        "import sys; from kvgen.cli.main import run; code = run(sys.argv[1:]); "
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules); sys.exit(code)"
    )
    command = [sys.executable, "-c", code, "cache", "show", str(kept)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    # 2 layers of 2 tensors with 2 heads of 8 numbers, 4 bytes each, for 10 tokens
    assert f"{kept}: 10 tokens of" in done.stdout
    assert "2 x full_attention: 2.5 KiB" in done.stdout
    for name in Fingerprint.__dataclass_fields__:
        assert f"{name}: " in done.stdout


def test_verify_computes_again_and_finds_what_is_wrong(
    cli: Cli, tiny_folder: Path, kept: Path
) -> None:
    done = cli("cache", "verify", kept, "-m", tiny_folder)
    assert done.returncode == 0, done.stderr
    assert "10 tokens computed again" in done.stdout
    opened: CacheFile = open_cache_file(kept)
    state, header = opened.state(), opened.header
    state.tensors["layers.1.pairs.1"][0, 1, 4, 3] += 0.01

    write_cache_file(kept, header, opened.ids, state)  # with a checksum that is right
    done = cli("cache", "verify", kept, "-m", tiny_folder)
    assert done.returncode == 5
    assert "layers.1.pairs.1" in done.stdout
    assert "does not hold what this model computes" in done.stderr


def test_a_wrong_model_tokenizer_or_dtype_is_refused_and_nothing_overwritten(
    cli: Cli, tiny_folder: Path, kept: Path, tmp_path: Path
) -> None:
    before = kept.read_bytes()
    other = tmp_path / "other"
    other.mkdir()
    save_tiny_llama(other, initializer_range=0.4)
    tokenizer = tmp_path / "tokenizer"
    shutil.copytree(tiny_folder, tokenizer)
    text = (tokenizer / "tokenizer.json").read_text("utf-8")
    (tokenizer / "tokenizer.json").write_text(
        text.replace('"add_prefix_space": false', '"add_prefix_space": true')
        if '"add_prefix_space": false' in text
        else text.replace('"add_prefix_space":false', '"add_prefix_space":true'),
        "utf-8",
    )
    generate(cli, tiny_folder, kept, "--prompt-cache-ro")  # takes what saving has printed
    for folder, more, message in (
        (other, (), "another model configuration; another set of weights"),
        (tokenizer, (), "another tokenizer"),
        (tiny_folder, ("--dtype", "bfloat16"), "dtype float32, not bfloat16"),
        (tiny_folder, ("--cache", "int8"), "--cache plain, not int8"),
    ):
        done = generate(cli, folder, kept, *more)
        assert (done.returncode, done.stdout) == (2, "")
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert kept.read_bytes() == before


def test_a_full_disk_costs_the_file_and_not_the_text(
    cli: Cli, tiny_folder: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, expected = kept.read_bytes(), generate(cli, tiny_folder, kept, "--prompt-cache-ro")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    done = generate(cli, tiny_folder, kept, "-q")
    assert (done.returncode, done.stdout) == (0, expected.stdout)
    assert done.stderr == (
        f"kvgen: {kept} was not written and is as it was: No space left on device\n"
    )
    assert kept.read_bytes() == before
    done = cli("cache", "save", "Time flies by me", kept, "-m", tiny_folder, "-q")
    assert done.returncode == 1
    assert "No space left on device" in done.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (("--prompt-cache", "{missing}", "--prompt-cache-ro"), "is not there"),
        (("--prompt-cache-ro",), "give both"),
        (("--prompt-cache", "{folder}"), "give a file"),
        (("--prompt-cache", "{missing}/below"), "its folder must exist"),
        (("--prompt-cache", "{missing}", "--no-cache"), "needs the cache"),
        (("--prompt-cache", "{text}"), "no cache file of kvgen"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused(
    cli: Cli, tiny_folder: Path, tmp_path: Path, line: tuple[str, ...], message: str
) -> None:
    text = tmp_path / "text"
    text.write_text("not a cache at all")
    places = {"missing": tmp_path / "missing", "folder": tmp_path, "text": text}
    done = cli("generate", "Time", "-m", tiny_folder, *(part.format(**places) for part in line))
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert text.read_text() == "not a cache at all"


def test_show_and_verify_refuse_what_is_no_cache_file(cli: Cli, tmp_path: Path) -> None:
    for command in ("show", "verify"):
        done = cli("cache", command, tmp_path / "missing")
        assert done.returncode == 2
        assert "missing" in done.stderr
