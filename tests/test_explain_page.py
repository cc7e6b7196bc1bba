"""The page of ``kvgen explain --html``: what it carries, and how it behaves in a real browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import browser, requests, why_absent
from loaded import loaded_tiny

from kvgen.measure.explain import ExplainOptions, ExplanationRun
from kvgen.measure.explanation import Explanation
from kvgen.report.document import to_json
from kvgen.report.explain_page import explanation_document, explanation_page

needs_browser = pytest.mark.skipif(bool(why_absent()), reason=why_absent() or "present")

ATTACK = "</script><img src=x onerror=\"document.title='owned'\">&<!--\u2028\u2029"


@pytest.fixture(scope="module")
def record() -> Explanation:
    return ExplanationRun(
        loaded_tiny("gemma3_text", limit=70), ExplainOptions("Time flies", 5)
    ).explain()


def carried(page: str) -> dict[str, Any]:
    """The document inside a page, as a browser cuts it out."""
    inside = page.split('<script type="application/json" id="record">', 1)[1].split("</script", 1)[
        0
    ]
    document: dict[str, Any] = json.loads(inside)
    return document


def test_the_page_carries_the_very_document(record: Explanation) -> None:
    document = json.loads(to_json(explanation_document(record)))
    assert carried(explanation_page(record)) == document


def test_text_of_model_and_user_is_escaped(record: Explanation) -> None:
    evil = explanation_page(_with_attack(record))
    assert carried(evil)["prompt"] == ATTACK
    plain = explanation_page(record)
    for piece in ("</script", "<img", "<!--", "\u2028", "\u2029"):
        assert evil.count(piece) == plain.count(piece)


def test_half_a_surrogate_pair_does_not_stop_the_page(record: Explanation) -> None:
    evil = _with_attack(record)
    evil.prompt = "\ud800"
    assert carried(explanation_page(evil))["prompt"] == "\ud800"


def test_the_page_names_nothing_outside_itself(record: Explanation) -> None:
    page = explanation_page(record)
    addresses = set(re.findall(r"https?://[^\s\"']+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, never fetched
    assert not re.search(r"<(link|script|img|iframe)[^>]+(src|href)=\"(?!data:)", page)
    assert "default-src 'none'" in page
    assert "innerHTML" not in page


def _with_attack(record: Explanation) -> Explanation:
    from copy import deepcopy

    evil = deepcopy(record)
    evil.prompt = evil.model.name = evil.environment.cpu = ATTACK
    evil.notes.append(ATTACK)
    for token in evil.tokens:
        token.token = ATTACK
    for stage in evil.stages:
        for choice in (*stage.choices, stage.chosen):
            choice.token = ATTACK
    for layer in evil.layers:
        layer.kind = layer.keeps = ATTACK
    return evil


# In a browser


class Opened:
    """A page in a browser."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, folder: Path, record: Explanation) -> None:
        file = folder / "page.html"
        file.write_text(explanation_page(record), "utf-8")
        self.driver.get_log("browser")
        requests(self.driver)
        self.driver.get(file.as_uri())
        self.address = file.as_uri()

    def run(self, script: str) -> Any:
        return self.driver.execute_script(script)

    def field(self, name: str) -> str:
        element = self.driver.find_element("css selector", f'#facts [data-field="{name}"]')
        return str(element.text)

    def number(self, name: str) -> int:
        """The first number a field shows."""
        return int(re.findall(r"[\d,]+", self.field(name))[0].replace(",", ""))

    def width(self, pixels: int) -> None:
        metrics = {"width": pixels, "height": 740, "deviceScaleFactor": 2, "mobile": True}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def media(self, **features: str) -> None:
        every = [{"name": k.replace("_", "-"), "value": v} for k, v in features.items()]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": every})


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def page(driver: Any, tmp_path: Path, record: Explanation) -> Opened:
    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    opened = Opened(driver)
    opened.open(tmp_path, record)
    return opened


def rows(page: Opened, table: str) -> list[list[str]]:
    """The classes of a grid's cells, row by row."""
    script = "return [...document.querySelectorAll('#' + arguments[0] + ' tbody tr')].map(r =>"
    script += " [...r.querySelectorAll('td')].map(c => c.className))"
    found: list[list[str]] = page.driver.execute_script(script, table)
    return found


def check_against(page: Opened, document: dict[str, Any], index: int) -> None:
    """What the page shows now is what the document says of stage ``index``."""
    stage = document["stages"][index]
    twin = stage["twin"]
    for name in ("kv_bytes_before", "kv_bytes_used", "operations"):
        assert page.number(name) == stage[name], name
    assert page.number("keys_read") == stage["attention"]["keys_read"]
    assert page.number("twin_tokens") == twin["tokens"]
    assert page.number("twin_repeated") == twin["repeated"]
    assert page.field("input_shape") == str(stage["input_shape"])
    assert page.field("query_shape").startswith(str(stage["attention"]["query_shape"]))
    power = int(f"{twin['max_abs_logit_difference']:.1e}".split("e")[1])
    assert f"e{power}" in page.field("difference")
    assert page.run("return document.querySelector('#grid-cached tr.now').dataset.stage") == str(
        stage["index"]
    )
    held = [layer["first_position"] for layer in stage["layers"]]
    drawn = rows(page, "memory")
    reached = stage["first_position"] + stage["tokens"]
    expected = list(dict.fromkeys(reached - first for first in held))
    assert [row.count("read") for row in drawn] == expected


@needs_browser
def test_the_slider_shows_each_stage_as_the_json_has_it(page: Opened, record: Explanation) -> None:
    from selenium.webdriver.common.keys import Keys

    document = json.loads(to_json(explanation_document(record)))
    check_against(page, document, 0)
    slider = page.driver.find_element("id", "slider")
    slider.send_keys(Keys.ARROW_RIGHT)
    for index in range(1, 5):
        check_against(page, document, index)
        slider.send_keys(Keys.ARROW_RIGHT)  # stays at the end
    slider.send_keys(Keys.HOME)
    check_against(page, document, 0)
    slider.send_keys(Keys.END)
    check_against(page, document, 4)
    page.driver.find_element("id", "back").click()
    check_against(page, document, 3)


@needs_browser
def test_the_grids_are_the_records(page: Opened, record: Explanation) -> None:
    assert rows(page, "grid-cached") == [stage.cells for stage in record.stages]
    assert rows(page, "grid-uncached") == [stage.twin.cells for stage in record.stages]
    shown = page.run("return document.getElementById('work-uncached').textContent")
    assert shown == f"{record.work.uncached} tokens forwarded"


@needs_browser
def test_the_chart_has_every_measured_point(page: Opened, record: Explanation) -> None:
    titles = page.run("return [...document.querySelectorAll('svg title')].map(t => t.textContent)")
    tokens = sorted(int(title.split()[0]) for title in titles)
    assert tokens == sorted([point.tokens for point in record.curve] * 2)


@needs_browser
def test_no_console_message_and_no_request_leaves_the_page(page: Opened) -> None:
    page.driver.find_element("id", "on").click()
    assert page.driver.get_log("browser") == []
    assert [url for url in requests(page.driver) if not url.startswith("data:")] == [page.address]


@needs_browser
def test_a_console_message_or_a_request_would_be_seen(page: Opened, tmp_path: Path) -> None:
    """The test above can fail."""
    file = tmp_path / "bad.html"
    file.write_text('<img src="http://127.0.0.1:9/x.png"><script>nonsense()</script>', "utf-8")
    page.driver.get(file.as_uri())
    assert "http://127.0.0.1:9/x.png" in requests(page.driver)
    assert any("nonsense" in entry["message"] for entry in page.driver.get_log("browser"))


@needs_browser
@pytest.mark.parametrize("width", [320, 360, 768])
def test_nothing_runs_out_of_a_narrow_page(page: Opened, width: int) -> None:
    page.width(width)
    page.run("show(4)")
    assert page.run("return document.documentElement.scrollWidth") <= width
    assert page.run("return document.getElementById('on').getBoundingClientRect().height") >= 40


@needs_browser
def test_attacks_stay_text(driver: Any, tmp_path: Path, record: Explanation) -> None:
    page = Opened(driver)
    page.open(tmp_path, _with_attack(record))
    page.run("show(2)")
    assert page.driver.title.startswith("What the cache does")
    assert page.run("return document.querySelectorAll('img').length") == 0
    assert driver.get_log("browser") == []
    page.width(360)
    assert page.run("return document.documentElement.scrollWidth") <= 360


@needs_browser
def test_dark_and_light_follow_the_system_and_keep_their_contrast(page: Opened) -> None:
    ratios = {}
    for scheme in ("light", "dark"):
        page.media(prefers_color_scheme=scheme)
        ratios[scheme] = page.run(_CONTRAST)
    backgrounds = {scheme: found.pop("page") for scheme, found in ratios.items()}
    assert backgrounds["light"] > 0.8 > 0.1 > backgrounds["dark"]
    for scheme, found in ratios.items():
        assert {name: ratio for name, ratio in found.items() if ratio < 4.5} == {}, scheme
    page.media(prefers_color_scheme="light")


_CONTRAST = """
const light = rgb => { const c = rgb.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
  .map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
  return .2126 * c[0] + .7152 * c[1] + .0722 * c[2]; };
const clear = 'rgba(0, 0, 0, 0)';
const back = e => { while (getComputedStyle(e).backgroundColor === clear) e = e.parentElement;
  return light(getComputedStyle(e).backgroundColor); };
const found = { page: light(getComputedStyle(document.body).backgroundColor) };
for (const part of ['h1', '.soft', 'dt', 'dd', 'td.computed', 'td.read', 'td.recomputed',
  'td.evicted', 'td.ahead', 'button:not(:disabled)', '.good']) {
  const element = document.querySelector(part);
  const [a, b] = [light(getComputedStyle(element).color), back(element)].sort((x, y) => y - x);
  found[part] = (a + .05) / (b + .05);
}
return found;
"""


@needs_browser
def test_every_control_has_a_name_and_is_reached_by_tab(page: Opened) -> None:
    from selenium.webdriver.common.keys import Keys

    reached = []
    for _ in range(4):
        page.driver.switch_to.active_element.send_keys(Keys.TAB)
        reached.append(
            page.run(
                "const e = document.activeElement; return e.id || e.getAttribute('aria-label')"
            )
        )
    assert reached[:3] == ["slider", "on", "Grid with the cache"]  # back rests at the first step
    assert page.run("return document.getElementById('slider').getAttribute('aria-label')") == "Step"


@needs_browser
def test_a_print_shows_every_section_without_controls(page: Opened) -> None:
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    hidden = page.run(
        "return ['slider', 'back', 'on'].every(id =>"
        " getComputedStyle(document.getElementById(id)).display === 'none')"
    )
    assert hidden
    printed = page.driver.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})
    assert len(printed["data"]) > 10_000
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
