"""Cache files: what is refused, and by what name; what survives a full disk and a second writer."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from conftest import Cli
from test_reuse import holding
from tiny import save_tiny_llama

from kvgen.cache.disk import CacheFile, CacheFileError, open_cache_file
from kvgen.cache.fingerprint import Fingerprint
from kvgen.cache.manager import KVCache
from kvgen.cache.saving import load_cache, open_for, save_cache
from kvgen.report.document import schema

IDS = list(range(10, 30))
OWN = Fingerprint("float32", "c", "w", "t", "sdpa", "plain", "h")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kept.kv"
    save_cache(path, holding(IDS), IDS, OWN, "a model", 2.0, extra={"turns": [1, "two"]})
    return path


def loaded(path: Path) -> KVCache:
    cache = KVCache(holding([]).specs)
    load_cache(open_for(path, OWN), cache)
    return cache


def test_what_is_written_is_read_back_and_no_slack_with_it(file: Path) -> None:
    cache = loaded(file)
    assert cache.layers[0].pairs.views[0][0, 0, :, 0].int().tolist() == IDS
    opened = open_cache_file(file)
    assert opened.ids == IDS
    assert opened.header.extra == {"turns": [1, "two"]}
    assert (opened.header.seconds, opened.header.model) == (2.0, "a model")
    assert opened.layer_bytes() == [cache.bytes_used]
    # A little more than the pairs: the ids, the header and the checksums.
    assert file.stat().st_size < cache.bytes_used + 4 * len(IDS) + 2000


def test_a_file_is_private_and_one_that_is_replaced_keeps_its_permissions(file: Path) -> None:
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o640)
    save_cache(file, holding(IDS[:3]), IDS[:3], OWN)
    assert file.stat().st_mode & 0o777 == 0o640


def test_other_readers_of_safetensors_find_the_tensors(file: Path) -> None:
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        assert opened.get_tensor("token_ids").tolist() == IDS
        assert opened.get_tensor("layers.0.pairs.0").shape == (1, 1, len(IDS), 2)
        assert opened.metadata()["kvgen_cache_format"] == "1"


def test_writing_into_a_loaded_cache_leaves_its_file_alone(file: Path) -> None:
    before = file.read_bytes()
    cache = loaded(file)
    for view in cache.layers[0].pairs.views:
        view.zero_()
    assert file.read_bytes() == before


def test_every_flipped_byte_is_found(file: Path) -> None:
    good = file.read_bytes()
    for place in range(len(good)):
        bad = bytearray(good)
        bad[place] ^= 0x10
        file.write_bytes(bad)
        with pytest.raises(CacheFileError, match=r"kept\.kv") as refusal:
            loaded(file)
        assert "\n" not in str(refusal.value)
        assert file.read_bytes() == bytes(bad)


@pytest.mark.parametrize("left", [0, 1, 7, 8, 100, 1000, -33, -1])
def test_a_file_that_is_cut_short_is_refused(file: Path, left: int) -> None:
    file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(CacheFileError, match="cut short"):
        open_cache_file(file)


def rewritten(file: Path, change: Any) -> None:
    """Change the header and make every checksum right again."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    table = json.loads(content[8 : 8 + length])
    change(table)
    text = json.dumps(table).encode().ljust(length)
    beginning = len(text).to_bytes(8, "little") + text
    rest = bytearray(content[8 + length :])
    size = table["checksums"]["shape"][0]
    rest[-size : len(rest) - size + 4] = zlib.crc32(beginning).to_bytes(4, "little")
    file.write_bytes(beginning + rest)


def test_a_file_of_a_later_format_is_refused_by_its_number(file: Path) -> None:
    rewritten(file, lambda table: table["__metadata__"].update(kvgen_cache_format="2"))
    with pytest.raises(CacheFileError, match="cache format '2', and this kvgen reads format 1"):
        open_cache_file(file)


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table["layers.0.pairs.0"].update(dtype="F99"),
        lambda table: table["layers.0.pairs.0"].update(shape=[1, 1, 21, 2]),
        lambda table: table["layers.0.pairs.0"].update(shape=[-1, -1, 20, 2]),
        lambda table: table["layers.0.pairs.0"].update(data_offsets=[8, 168]),
        lambda table: table["layers.0.pairs.0"].update(data_offsets="x"),
        lambda table: table.pop("token_ids"),
        lambda table: table.pop("checksums"),
        lambda table: table.pop("__metadata__"),
        lambda table: table["__metadata__"].update(kvgen_cache="[]"),
        lambda table: table["__metadata__"].update(kvgen_cache='{"fingerprint": {"dtype": "x"}}'),
    ],
)
def test_a_header_that_makes_no_sense_is_refused(file: Path, change: Any) -> None:
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    table = json.loads(content[8 : 8 + length])
    change(table)
    text = json.dumps(table).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    with pytest.raises(CacheFileError, match=r"no cache file of kvgen|cut short|damaged"):
        open_cache_file(file)


def test_a_sound_file_that_does_not_fit_the_layers_is_refused(file: Path) -> None:
    cache = KVCache(holding([], window=8).specs)
    with pytest.raises(CacheFileError, match="does not hold what the layers"):
        load_cache(open_for(file, OWN), cache)
    assert cache.position == 0


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("dtype", "dtype float32, not other"),
        ("attention", "attention sdpa, not other"),
        ("storage", "--cache plain, not other"),
        ("configuration", "another model configuration"),
        ("weights", "another set of weights"),
        ("tokenizer", "another tokenizer"),
    ],
)
def test_whatever_differs_is_named(file: Path, field: str, message: str) -> None:
    with pytest.raises(CacheFileError, match=message):
        open_for(file, Fingerprint(**{**vars(OWN), field: "other"}))
    open_for(file, Fingerprint(**{**vars(OWN), "chat_template": "other"}))


def test_a_cache_is_not_written_for_ids_it_does_not_hold(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds 20 tokens, not 19"):
        save_cache(tmp_path / "kept.kv", holding(IDS), IDS[:-1], OWN)


def test_a_full_disk_leaves_the_old_file_as_it_was(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = file.read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save_cache(file, holding(IDS[:5]), IDS[:5], OWN)
    assert file.read_bytes() == before
    assert os.listdir(file.parent) == [file.name]


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_cache_files import OWN, save_cache
from test_reuse import holding
ids = [int(sys.argv[3])] * 2000
cache = holding(ids)
print("ready", flush=True)
sys.stdin.readline()
for _ in range(100):
    save_cache(Path(sys.argv[2]), cache, ids, OWN)
"""


def test_two_writers_leave_one_whole_file_at_any_time(tmp_path: Path) -> None:
    path = tmp_path / "kept.kv"
    command = [sys.executable, "-c", WRITER, str(Path(__file__).parent), str(path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    writers = [subprocess.Popen([*command, name], **pipes) for name in ("1", "2")]
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.stdin.write("\n")
        writer.stdin.flush()
    seen = set()
    while any(writer.poll() is None for writer in writers):
        if path.exists():
            opened = open_cache_file(path)
            opened.check()
            seen |= set(opened.ids)
            assert len(set(opened.ids)) == 1
    assert [writer.wait() for writer in writers] == [0, 0]
    for writer in writers:
        writer.stdin.close()
        writer.stdout.close()
    assert seen <= {1, 2}
    assert seen
    assert os.listdir(tmp_path) == [path.name]


# The commands


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
    for name in vars(OWN):
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
    from kvgen.cache.disk import write_cache_file

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


def test_tensors_of_any_dtype_come_back_bit_for_bit(tmp_path: Path) -> None:
    from kvgen.cache.disk import Header, write_cache_file
    from kvgen.cache.state import State

    names = ("float32", "bfloat16", "float16", "uint8", "int64", "float64", "bool")
    tensors = {
        f"layers.{i}.{name}": torch.arange(7).to(getattr(torch, name))
        for i, name in enumerate(names)
    }
    path = tmp_path / "kept"
    write_cache_file(path, Header(OWN, "", ["x"] * len(names)), [], State(tensors))
    opened = open_cache_file(path)
    opened.check()
    back = opened.state().tensors
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())
    assert {name: t.dtype for name, t in back.items()} == {n: t.dtype for n, t in tensors.items()}
