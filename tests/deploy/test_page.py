"""The live page in a real browser, on a node under load."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.browser import Browser, Page, chromium
from tests.deploy.node import node_under_load

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(120)]

SCHEMES = ["light", "dark"]
LIVE = "document.getElementById('link')?.textContent === 'Live'"

# The least contrast of any text with what is behind it, by WCAG 2.
CONTRAST = """(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const light = (color) => {
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((c) => c / 255)
      .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = getComputedStyle(at).backgroundColor;
      if (color !== "rgba(0, 0, 0, 0)") return color;
    }
    return "white";
  };
  let least = 21;
  for (const element of document.querySelectorAll("body *")) {
    if (![...element.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim())) continue;
    const style = getComputedStyle(element);
    const [a, b] = [light(element instanceof SVGElement ? style.fill : style.color),
      light(behind(element))].sort((x, y) => x - y);
    least = Math.min(least, (b + 0.05) / (a + 0.05));
  }
  return least;
})()"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with node_under_load(tmp_path_factory.mktemp("node")) as (_, url):
        yield f"{url}/crossover/"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    folder: Path = tmp_path_factory.mktemp("browser")
    with chromium(folder) as browser:
        yield browser


@pytest.fixture(params=SCHEMES)
def page(request: pytest.FixtureRequest, browser: Browser, url: str) -> Page:
    page = browser.page()
    page.open(url, scheme=request.param)
    page.until(f"document.readyState === 'complete' && {LIVE}")
    return page


def test_the_page_shows_a_node_under_load(page: Page) -> None:
    for id_ in ("in-flight", "queue", "rate", "ttft", "crossing", "regret"):
        page.until(f"/[0-9]/.test(document.getElementById('{id_}').textContent)")
    assert page.look("document.querySelectorAll('#servers tr').length") == 2
    assert page.look("document.querySelectorAll('#servers .up').length") == 2
    page.until("document.querySelectorAll('#c-tpot path.curve').length === 2")
    page.until("document.querySelectorAll('#c-tpot circle').length === 2")
    page.until("document.querySelectorAll('#c-rate path.curve').length === 2")
    page.until("document.querySelectorAll('#decisions tr').length > 5")
    assert "Policy marginal" in page.look("document.getElementById('mode').textContent")
    assert page.problems == []


# How a server differs from one that is up and idle; what its row says, and whether it is well.
STANDING = [
    ({}, "● up", True),
    ({"breaker": "open"}, "◐ failed several times in a row: left alone for a while", False),
    ({"breaker": "half_open"}, "◐ failed several times in a row: one request is its trial", False),
    ({"drained": True}, "○ drained, nothing left", False),
    ({"drained": True, "load": {"sequences": 3}}, "○ drained, what it has goes on", False),
    ({"up": False, "state": "down", "last_error": "refused"}, "✕ down: refused", False),
    ({"up": False, "state": "starting", "drained": True}, "✕ starting; drained", False),
]


def test_how_a_server_stands_is_said_in_words(browser: Browser, url: str) -> None:
    page = browser.page()
    page.open(url, scheme="light")
    page.until(f"document.readyState === 'complete' && {LIVE}")
    well = {"up": True, "drained": False, "breaker": "closed", "load": {"sequences": 0}}
    for other, words, good in STANDING:
        told = page.look(f"standingOf({json.dumps({**well, **other})})")
        assert told == [words, good]


def test_what_stops_work_is_warned_of(browser: Browser, url: str) -> None:
    page = browser.page()
    page.open(url, scheme="light")
    page.until(f"document.readyState === 'complete' && {LIVE}")
    well = {
        "stage": "serving", "settings_latest": True, "layout_warning": None, "parity_warnings": [],
        "servers": [{"up": True, "drained": False}, {"up": False, "drained": False}],
    }  # fmt: skip
    drained = [{"up": True, "drained": True}, {"up": False, "drained": False}]
    for other, words in (
        ({"stage": "draining"}, "shutting down"),
        ({"settings_latest": False}, "settings that were read last are wrong"),
        ({"servers": drained}, "No server takes requests"),
        ({"parity_warnings": ["dtype differs"]}, "dtype differs"),
    ):
        (warning,) = page.look(f"warningsOf({json.dumps({**well, **other})})")
        assert words in warning
    assert page.look(f"warningsOf({json.dumps(well)})") == []
    assert page.look("queued({ interactive: 3, batch: 2 })") == "5, 2 of them batch"
    assert page.look("queued({ interactive: 3, batch: 0 })") == "3"


def test_the_figures_move(page: Page) -> None:
    first = page.look("document.getElementById('decisions').textContent")
    page.until(f"document.getElementById('decisions').textContent !== {first!r}")


def test_nothing_comes_from_elsewhere(page: Page, url: str) -> None:
    names = page.look("performance.getEntriesByType('resource').map((one) => one.name)")
    assert names
    assert all(name.startswith((url, "data:")) for name in names)


def test_text_stands_out(page: Page) -> None:
    page.until("document.querySelectorAll('#servers tr').length === 2")
    assert page.look(CONTRAST) >= 4.5


def test_the_keyboard_reaches_all_that_can_be_used(page: Page) -> None:
    reached = []
    for _ in range(6):
        page.press("Tab")
        outline = "getComputedStyle(document.activeElement).outlineStyle"
        reached.append(page.look(f"[document.activeElement.tagName, {outline}]"))
    assert [tag for tag, _ in reached][:4] == ["A", "BUTTON", "DIV", "SUMMARY"]
    assert all(outline != "none" for _, outline in reached[:4])


def test_a_screen_reader_finds_names_and_quiet_live_regions(page: Page) -> None:
    tree = page.call("Accessibility.getFullAXTree")["nodes"]
    named = {
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in tree
        if "role" in node
    }
    for expected in (
        ("main", ""), ("region", "Now"), ("region", "Servers"), ("button", "Pause"),
        ("heading", "Crossover"), ("columnheader", "In flight"), ("rowheader", "spec (spec)"),
    ):  # fmt: skip
        assert expected in named
    images = [name for role, name in named if role in ("image", "img")]
    assert len(images) == 4
    assert all(images)
    assert set(
        page.look("[...document.querySelectorAll('[aria-live]')].map((one) => one.ariaLive)")
    ) == {"polite"}


def test_a_paused_page_asks_for_nothing(page: Page) -> None:
    page.look("document.getElementById('pause').click()")
    assert page.look("document.getElementById('pause').ariaPressed") == "true"
    # A question that was under way ends; then none follows.
    page.until("!asking")
    assert page.look("poll(), timer === null && !asking")
    page.look("document.getElementById('pause').click()")
    page.until(LIVE)


def test_a_hidden_page_asks_for_nothing(page: Page) -> None:
    page.look("Object.defineProperty(document, 'hidden', {value: true, configurable: true})")
    page.until("!asking && timer === null")
    page.look("delete document.hidden, document.dispatchEvent(new Event('visibilitychange'))")
    page.until("asking || timer !== null")


def test_a_narrow_screen_needs_no_sideways_scrolling(browser: Browser, url: str) -> None:
    page = browser.page()
    page.open(url, scheme="light", width=360, height=740)
    page.until(f"document.readyState === 'complete' && {LIVE}")
    assert page.look("document.documentElement.scrollWidth") <= 360


def test_a_router_that_is_gone_is_told(browser: Browser, tmp_path: Path) -> None:
    page = browser.page()
    with node_under_load(tmp_path) as (_, url):
        page.open(f"{url}/crossover/", scheme="light")
        page.until(f"document.readyState === 'complete' && {LIVE}")
    page.until("document.getElementById('link').textContent === 'The router does not answer'")
