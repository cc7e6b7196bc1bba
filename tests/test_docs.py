"""What the pages name exists: links and their headings, tests, files of the code, commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("configs/**/*.md")])
PLACEHOLDER = "test_x.py"


def headings(page: Path) -> set[str]:
    """The anchors that a page's headings make, as GitHub spells them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        assert not anchor or anchor in headings(file), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_tests_that_a_page_names_exist(page: Path) -> None:
    names = re.findall(r"\b(?:test|malformed)_\w+\.py", page.read_text("utf-8"))
    missing = {name for name in names if not (ROOT / "tests" / name).exists()}
    assert missing <= {PLACEHOLDER}


def test_the_map_of_the_code_names_files_that_exist() -> None:
    """Names are given from the checkout or, within a room's line, from ``kvgen``."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    rooms = "cache|cli|engine|measure|models|report"
    named = re.findall(rf"`((?:kvgen/)?(?:{rooms})/[\w/]*(?:\.py)?)`", text)
    assert len(named) > 10
    for name in named:
        assert (ROOT / "kvgen" / name.removeprefix("kvgen/")).exists(), name


def test_the_cache_room_lists_its_files_each_once() -> None:
    import kvgen.cache

    listed = re.findall(r"^    (\w+)  ", kvgen.cache.__doc__ or "", re.MULTILINE)
    files = {file.stem for file in (ROOT / "kvgen" / "cache").glob("[!_]*.py")}
    assert sorted(listed) == sorted(files)
