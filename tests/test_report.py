"""What people and programs are shown: numbers, untrusted text, the table, the document."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kvgen.measure.records import (
    Check,
    CheckedStep,
    Environment,
    Generation,
    ModelFacts,
    Step,
    Totals,
)
from kvgen.report import document
from kvgen.report.table import check_line, print_generation, shown_steps
from kvgen.report.units import bytes_text, seconds_text, visible, visible_lines

ROOT = Path(__file__).parent.parent

# Numbers


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (46_080, "45.0 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (1024**2, "1.0 MiB"),
        (1024**3 - 1, "1.0 GiB"),
        (5 * 1024**3, "5.0 GiB"),
        (1024**4, "1.0 TiB"),
        (2000 * 1024**4, "2000.0 TiB"),
    ],
)
def test_bytes_are_in_the_largest_binary_unit_that_fits(count: int, text: str) -> None:
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.00 µs"),
        (1e-6, "1.00 µs"),
        (0.0000456, "45.6 µs"),
        (0.000999, "999 µs"),
        (0.0009996, "1.00 ms"),
        (0.001, "1.00 ms"),
        (0.009994, "9.99 ms"),
        (0.009996, "10.0 ms"),
        (0.04734, "47.3 ms"),
        (0.09996, "100 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.00 s"),
        (1.0, "1.00 s"),
        (1.516, "1.52 s"),
        (123.4, "123 s"),
    ],
)
def test_seconds_have_three_figures_in_a_unit_that_fits(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


@given(st.floats(1e-6, 900))
def test_no_time_is_a_thousand_of_a_smaller_unit(seconds: float) -> None:
    figures, unit = seconds_text(seconds).split()
    assert len(figures.replace(".", "")) == 3
    assert float(figures) < 1000
    scale = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}[unit]
    assert float(figures) * scale == pytest.approx(seconds, rel=0.006)


@given(st.integers(0, 2**49))
def test_no_count_is_1024_of_a_smaller_unit(count: int) -> None:
    figures, unit = bytes_text(count).split()
    assert float(figures) < 1024
    scale = 1024.0 ** ["B", "KiB", "MiB", "GiB", "TiB"].index(unit)
    assert float(figures) * scale == pytest.approx(count, rel=0.06)


# Untrusted text

ATTACKS = {
    "colour": "\x1b[31mred\x1b[0m",
    "clear the screen": "\x1b[2J\x1b[H",
    "title": "\x1b]0;owned\x07",
    "clipboard (OSC 52)": "\x1b]52;c;ZXZpbA==\x07",
    "link (OSC 8)": "\x1b]8;;http://x\x1b\\x\x1b]8;;\x1b\\",
    "8-bit CSI": "\x9b31m",
    "8-bit OSC": "\x9d0;owned\x9c",
    "carriage return": "safe\rfake",
    "backspace": "safe\x08\x08fake",
    "bell": "\x07",
    "delete": "\x7f",
    "null": "\x00",
    "bidi override": "abc\u202edef",
    "bidi isolate": "abc\u2066def\u2069",
    "line separator": "a\u2028b\u2029c",
    "lone surrogate": "\ud800",
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
@pytest.mark.parametrize("show", [visible, visible_lines])
def test_characters_that_act_are_spelled_out(show: Any, attack: str) -> None:
    shown = show(attack)
    acting = {c for c in attack if not c.isprintable()}
    assert not acting & set(shown)
    assert shown == attack.translate({ord(c): c.encode("unicode_escape").decode() for c in acting})


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        "[bold]brackets[/bold] :smile: \\[x]",
        "👩‍👩‍👧 family, 🏳️‍🌈 flag",
        "نص عربي می‌خواهم",
        "日本語 \u3000 wide space",
        "no\u00a0break",
        "soft\u00adhyphen",
        "marks \u200fof\u200e direction\u061c",
        "🏴󠁧󠁢󠁥󠁮󠁧󠁿",
    ],
)
def test_ordinary_text_stays_as_it_is(text: str) -> None:
    assert visible(text) == text


def test_line_breaks_and_tabs_stay_in_text_and_are_spelled_out_in_a_cell() -> None:
    assert visible_lines("a\n\tb") == "a\n\tb"
    assert visible("a\n\tb") == r"a\n\tb"


@given(st.text())
def test_no_text_is_shown_with_a_control_character(text: str) -> None:
    assert all(ord(c) >= 32 and not 0x7F <= ord(c) < 0xA0 for c in visible(text))
    visible(text).encode("utf-8")


# The table


def record_of(steps: int = 3, **changes: Any) -> Generation:
    """A record with numbers that are easy to recognise."""
    record = Generation(
        model=ModelFacts("toy", "folder", "/toy", None, "llama", 10, 40, 2, 128, 2048),
        environment=Environment(
            *("0", None, "3", "2", "5", "Linux", "cpu", 4, 2, 0.5, "cpu", "float32", "sdpa", 1e10)
        ),
        cached=True,
        prompt="Time",
        prompt_tokens=4,
        prompt_ids=[1, 2, 3, 4],
        max_new_tokens=steps,
        prefill_chunk=None,
        sampling={
            "temperature": 0.0,
            "top_k": None,
            "top_p": None,
            "min_p": None,
            "repetition_penalty": 1.0,
            "seed": None,
        },
        text="abc",
        kv_bytes_formula=2048 * (3 + steps),
        steps=[
            Step(
                *(i, 65, "a", "a", 4 + i, 0.010, 4 if i == 0 else 1, 4 + i),
                *(2048 * (4 + i), 8192, 1000, 0.5, 0.035, "fitted" if 0 < i < steps - 1 else None),
            )
            for i in range(steps)
        ],
        totals=Totals(1.0, 0.5, 0.010, 0.020, 0.001, 0.510, 0.010, 6, 0.105),
        check=Check([CheckedStep(0, True, 2e-6, 1.0)], 1e-4, "exact"),
    )
    for step in (record.steps[0], record.steps[-1]) if steps else ():
        step.recompute_source = "measured"
    return dataclasses.replace(record, **changes)


def shown(record: Generation, trace: bool = False, width: int = 80) -> list[str]:
    console = Console(width=width, markup=False, highlight=False, no_color=True)
    with console.capture() as capture:
        print_generation(record, console, trace)
    return capture.get().splitlines()


def rows(lines: list[str]) -> list[str]:
    first = [line.split()[0] for line in lines[3:] if line.strip()]  # after title and heads
    return [word for word in first if word.isdigit()]


@pytest.mark.parametrize("count", [0, 1, 2, 14])
def test_a_short_output_is_shown_whole(count: int) -> None:
    assert shown_steps(count) == list(range(count))


@given(st.integers(15, 5000))
def test_a_long_output_shows_its_first_its_last_and_evenly_spaced_steps(count: int) -> None:
    steps = shown_steps(count)
    assert steps[:5] == [0, 1, 2, 3, 4]
    assert steps[-3:] == [count - 3, count - 2, count - 1]
    assert steps == sorted(set(steps))
    assert len(steps) == 14
    middle = [4, *steps[5:-3], count - 3]
    gaps = [b - a for a, b in pairwise(middle)]
    assert max(gaps[1:]) - min(gaps[1:]) <= 1


def test_the_table_shows_those_steps_and_all_of_them_with_trace() -> None:
    record = record_of(30)
    assert rows(shown(record)) == [str(i) for i in shown_steps(30)]
    assert rows(shown(record, trace=True)) == [str(i) for i in range(30)]


def test_a_row_has_latency_bytes_the_cost_without_a_cache_and_the_gain() -> None:
    lines = shown(record_of(3))
    assert next(line for line in lines if line.split()[:1] == ["1"]).split() == (
        ["1", "a", "10.0", "ms", "10.0", "KiB", "~35.0", "ms", "3.5x"]
    )
    assert next(line for line in lines if line.split()[:1] == ["2"]).split()[6] == "35.0"
    total = next(line for line in lines if line.split()[:1] == ["total"]).split()
    assert total == ["total", "3", "tokens", "30.0", "ms", "12.0", "KiB", "~105", "ms", "3.5x"]


@pytest.mark.parametrize("verdict", ["exact", "tolerance"])
def test_a_gain_is_shown_with_its_verdict(verdict: Any) -> None:
    lines = shown(record_of(check=Check([CheckedStep(0, True, 2e-6, 1.0)], 1e-4, verdict)))
    assert any("3.5x" in line for line in lines)
    assert lines[2].endswith("gain")


@pytest.mark.parametrize(
    "check", [None, Check([CheckedStep(0, False, 3.0, 1.0)], 1e-4, "broken")], ids=["none", "bad"]
)
def test_without_a_good_verdict_there_is_no_gain(check: Check | None) -> None:
    lines = shown(record_of(check=check))
    assert not any("3.5x" in line or line.endswith("gain") for line in lines)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "checked at 1 of 3 positions: identical, max |Δlogit| 2.0e-06"),
        ({"check": None}, "not checked against the uncached model"),
        ({"cached": False}, "no cache in use: every step forwarded the whole prefix"),
        (
            {"check": Check([CheckedStep(0, False, 2e-5, 1e-5)], 1e-4, "tolerance")},
            "checked at 1 of 3 positions: same within 1.0e-04, max |Δlogit| 2.0e-05, "
            "but a near tie fell otherwise",
        ),
        (
            {"check": Check([CheckedStep(0, False, 3.0, 1.0)], 1e-4, "broken")},
            "checked at 1 of 3 positions: BROKEN, max |Δlogit| 3.0e+00 where 1.0e-04 is accepted",
        ),
    ],
)
def test_the_last_line_says_what_the_check_found(changes: dict[str, Any], line: str) -> None:
    record = record_of(notes=["a note"], **changes)
    assert check_line(record) == line
    assert shown(record, width=200)[-1] == line
    assert "a note" in shown(record)


def test_used_and_formula_bytes_stand_beside_each_other() -> None:
    equal = [line for line in shown(record_of(3)) if line.startswith("KV cache")]
    assert equal == ["KV cache: 12,288 bytes used = formula 12,288, 8,192 allocated"]
    unequal = [line for line in shown(record_of(3, kv_bytes_formula=5)) if "formula" in line]
    assert unequal == ["KV cache: 12,288 bytes used but formula 5, 8,192 allocated"]


def test_a_record_without_a_token_has_no_table() -> None:
    lines = shown(record_of(0, totals=None, check=None, finish_reason="interrupted"))
    assert not rows(lines)
    assert "interrupted" in lines[1]


def test_a_token_is_shown_as_text_and_never_interpreted() -> None:
    record = record_of(4)
    for step, token in zip(record.steps, ["[red]x[/]", "\x1b[31m", "\n", "漢" * 40], strict=True):
        step.token = token
    lines = shown(record)
    text = "\n".join(lines)
    assert "[red]x[/]" in text
    assert r"\x1b[31m" in text
    assert "\x1b" not in text
    from rich.cells import cell_len

    assert max(map(cell_len, lines)) <= 80


def test_a_narrow_terminal_cuts_no_number_short() -> None:
    assert shown(record_of(20), width=30)[-30:] != shown(record_of(20))[-30:]
    numbers = [line for line in shown(record_of(20)) if "KiB" in line and "ms" in line]
    assert len(numbers) == 15
    assert [line for line in shown(record_of(20), width=30) if "KiB" in line and "ms" in line] == (
        numbers
    )


def test_a_models_name_cannot_act_on_the_terminal() -> None:
    record = record_of()
    record.model.name = "evil\x1b]0;owned\x07"
    record.notes.append("note\x1b[2J")
    assert "\x1b" not in "\n".join(shown(record))


# The document


def test_the_document_of_a_record_fits_its_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(document.schema())
    jsonschema.validate(document.generation_document(record_of()), document.schema())


def test_a_field_that_the_schema_does_not_know_is_refused() -> None:
    """The test above can fail."""
    extra = document.generation_document(record_of()) | {"invented": 1}
    missing = document.generation_document(record_of())
    del missing["steps"][0]["latency_s"]
    for wrong in (extra, missing):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, document.schema())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_json_never_holds_what_is_no_number(value: float) -> None:
    record = record_of()
    record.steps[0].latency_s = value
    assert record.check is not None
    record.check.steps[0].max_abs_logit_difference = value
    text = document.to_json(document.generation_document(record))

    def refuse(name: str) -> None:
        raise AssertionError(name)

    parsed = json.loads(text, parse_constant=refuse)
    assert parsed["steps"][0]["latency_s"] is None
    assert parsed["check"]["steps"][0]["max_abs_logit_difference"] is None


def test_a_json_line_is_one_line_whatever_the_text() -> None:
    record = record_of()
    record.steps[0].text = "a\nb\u2028c\r"
    lines = [
        document.run_line(record),
        document.step_line(record.steps[0]),
        document.result_line(record),
    ]
    for line in lines:
        assert "\n" not in document.to_json(line)
        assert "\r" not in document.to_json(line)
    assert json.loads(document.to_json(lines[1]))["text"] == "a\nb\u2028c\r"


def test_run_steps_and_result_together_hold_every_field_of_the_document() -> None:
    record = record_of()
    whole = set(document.generation_document(record))
    lines = set(document.run_line(record)) | set(document.result_line(record))
    assert whole - lines == {"prompt", "prompt_ids", "prefill_chunk", "steps"}
