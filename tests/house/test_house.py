"""Rules of the house that no linter knows."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("router", "sglang_patch", "loadtest")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("tests/**/*.md")])
VAGUE = {"utils", "util", "helpers", "common", "misc", "manager"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_is_short_and_named_for_what_it_is(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400
    assert path.stem not in VAGUE


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_within_the_project_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    missing = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert not missing


def test_there_is_something_to_check() -> None:
    assert len(SOURCES) > 10
    assert len(PAGES) > 5


@pytest.mark.parametrize("page", sorted((ROOT / "docs/adr").glob("*.md")), ids=lambda p: p.name)
def test_a_decision_record_fits_on_a_page(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= 60
