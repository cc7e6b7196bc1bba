"""How a comparison is shown: charts, sentences, plots, and nothing that a name could inject."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from test_stats import compared

from kvgen.errors import UsageError
from kvgen.measure.comparison_records import Comparison
from kvgen.report import plot
from kvgen.report.chart import Series, chart
from kvgen.report.exporters import markdown, text
from kvgen.report.rows import Titled
from kvgen.report.units import factor_with_spread, seconds_with_spread
from kvgen.report.where_time_went import explanation


def record() -> Comparison:
    """Cached steps of 10, 11 and 12 s, uncached ones of 20, 30 and 40 s."""
    return compared(4, 1, 9, 10, 11, 12, 9, 20, 30, 40)


def test_a_chart_keeps_its_width_and_marks_every_curve() -> None:
    series = [Series("ours", range(100), [0.05] * 100), Series("theirs", range(100), [1.0] * 100)]
    lines = chart(series, 80)
    assert max(map(len, lines)) <= 80
    assert "log scale" in lines[0]
    drawn = "\n".join(lines[1:-3])
    assert "*" in drawn
    assert "o" in drawn
    assert lines[-1].split() == ["*", "ours", "o", "theirs"]


def test_a_chart_of_near_curves_begins_at_zero() -> None:
    lines = chart([Series("ours", range(9), [1.0, 1.1, 1.2] * 3)])
    assert "linear scale" in lines[0]
    assert lines[-4].startswith("  0.00 µs |")
    assert "1.20 s |" in lines[1]


@pytest.mark.parametrize("series", [[], [Series("a", [], [])], [Series("a", [3], [1.0])]])
def test_there_is_no_chart_of_nothing(series: list[Series]) -> None:
    assert chart(series) == []


def test_equal_points_do_not_stop_a_chart() -> None:
    assert chart([Series("a", [5, 5], [1.0, 1.0])])


def test_spreads_share_the_unit_and_the_digits_of_their_value() -> None:
    assert seconds_with_spread(0.0473, 0.0012) == "47.3 ± 1.2 ms"
    assert seconds_with_spread(1.5, 0.01) == "1.50 ± 0.01 s"
    assert seconds_with_spread(2e-6, 1e-6) == "2.00 ± 1.00 µs"
    assert factor_with_spread(18.34, 0.44) == "18.3x ± 0.4"


def test_the_sentences_carry_this_runs_own_numbers() -> None:
    told = " ".join(explanation(record()))
    assert "1000 B of weights" in told
    assert "Each retained token adds 1,000,000,000 ± 0 ns" in told
    assert "attention over what is retained is about 58% of the step" in told  # 7 of 12 s
    assert "near 5 tokens it would be half" in told
    assert "process 15 tokens it had seen before" in told
    assert "each token more made every step 10.00 s longer" in told.replace("10.0 s", "10.00 s")
    assert "paid for its prefill by position 5, new token 2" in told


def test_a_slope_lost_in_the_scatter_is_not_claimed() -> None:
    told = " ".join(explanation(compared(4, 1, 9, 10, 14, 10, 9, 20, 30, 40)))
    assert "drowned in the scatter" in told
    assert "--depth 0,1024,4096" in told
    assert "boundary" not in told


def test_one_token_leaves_nothing_to_explain() -> None:
    one = compared(1, 1, 8, 9)
    assert explanation(one) == []
    assert "TPOT" in text([Titled("", one)])


def test_names_cannot_act_on_a_terminal_or_a_page() -> None:
    nasty = record()
    nasty.model = replace(nasty.model, name="evil\x1b[2J|<script>`x`")
    assert "\x1b" not in text([Titled("", nasty)])
    page = markdown([Titled("", nasty)])
    assert "<script" not in page
    assert "\x1b" not in page
    shown = text([Titled("a\x1b]0;x\x07", nasty), Titled("b", nasty)])
    assert "\x1b" not in shown
    assert "\x07" not in shown


def test_an_unknown_plot_suffix_and_a_missing_library_are_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UsageError, match="svg"):
        plot.check_plot(Path("x.pdf"))
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"pip install 'kvgen\[plot\]'"):
        plot.check_plot(Path("x.svg"))


@pytest.mark.parametrize("suffix", ["svg", "png", "html"])
def test_plots_are_drawn_with_labelled_axes(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [Titled("", record())]
    runs[0].record.model = replace(runs[0].record.model, name="<b>$x_</b>")
    target = tmp_path / f"plot.{suffix}"
    plot.draw(target, runs)
    content = target.read_bytes()
    assert list(tmp_path.iterdir()) == [target]
    if suffix == "png":
        assert content.startswith(b"\x89PNG")
        return
    page = content.decode("utf-8")
    assert "<svg" in page
    assert "<b>$" not in page
    if suffix == "html":
        assert page.count("<table>") == 2
        assert "no stylesheet" not in page
        assert not re.search(r"(src|href)=\"http", page.replace("xlink:href", ""))


def test_axes_name_their_unit_and_curves_differ_without_colour() -> None:
    pytest.importorskip("matplotlib")
    figure = plot._figure([Titled("", record())])
    axes = figure.axes[0]
    assert axes.get_xlabel() == "position (tokens)"
    assert axes.get_ylabel() == "time per step (ms)"
    looks = {(line.get_linestyle(), line.get_marker()) for line in axes.lines}
    assert len(looks) == len(axes.lines) == 2
