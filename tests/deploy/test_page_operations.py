"""What an operator does on the live page, in a real browser: with the key, and refused without."""

import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.browser import Browser, Page, chromium
from tests.deploy.node import node

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(120)]

ADMIN, CLIENT = "planted-admin-key", "planted-client-key"
LIVE = (
    "document.readyState === 'complete' && document.getElementById('link')?.textContent === 'Live'"
)
READ_ONLY = "document.getElementById('operate').hidden"
# All that a page keeps, or shows to whoever looks into it.
KEPT = """[document.documentElement.outerHTML, location.href, document.cookie, window.name,
  JSON.stringify(localStorage), JSON.stringify(sessionStorage), JSON.stringify(history.state),
  ...performance.getEntriesByType("resource").map((one) => one.name),
  ...[...document.querySelectorAll("input")].map((one) => one.value)].join()"""


@contextmanager
def keyed(folder: Path, *names: str) -> Iterator[str]:
    """A node with these keys, "admin" or "client"; the URL of its router."""
    keys = {"admin": ADMIN, "client": CLIENT}
    chosen = {}
    for name in names:
        (folder / name).write_text(keys[name])
        chosen["CLIENT_KEYS_FILE" if name == "client" else "ADMIN_KEY_FILE"] = str(folder / name)
    with node(**chosen) as (_, url):
        yield url


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture(scope="module")
def shared_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with keyed(tmp_path_factory.mktemp("node"), "admin") as url:
        yield url


@pytest.fixture
def url(shared_url: str) -> Iterator[str]:
    """A router that each test leaves as it found it."""
    yield shared_url
    for server in ("spec", "base"):
        post(shared_url, "drain", {"server": server, "drain": False})
    post(shared_url, "policy", {"policy": None})


@pytest.fixture
def page(browser: Browser, url: str) -> Page:
    return opened(browser, url)


def opened(browser: Browser, url: str, width: int = 1280) -> Page:
    page = browser.page()
    page.call("Emulation.setFocusEmulationEnabled", enabled=True)
    page.open(f"{url}/crossover/", scheme="light", width=width)
    page.until(LIVE)
    return page


def post(url: str, name: str, body: dict[str, Any]) -> None:
    headers = {"authorization": f"Bearer {ADMIN}"}
    request = urllib.request.Request(f"{url}/crossover/{name}", json.dumps(body).encode(), headers)
    urllib.request.urlopen(request, timeout=10).close()


def state(url: str, key: str = CLIENT) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{url}/crossover/state", headers={"authorization": f"Bearer {key}"}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        told: dict[str, Any] = json.load(answer)
    return told


def drained(url: str) -> list[str]:
    return [server["name"] for server in state(url)["servers"] if server["drained"]]


def give_key(page: Page, key: str = ADMIN) -> None:
    """Type the key and press Enter, as an operator does."""
    page.until("!document.getElementById('key-form').hidden")
    page.look("document.getElementById('key').focus()")
    page.call("Input.insertText", text=key)
    page.press("Enter")


def unlocked(browser: Browser, url: str) -> Page:
    page = opened(browser, url)
    give_key(page)
    page.until(f"!{READ_ONLY}")
    return page


def click(page: Page, text: str) -> None:
    """Click the button of this name; there must be one that can be used."""
    button = f"[...document.querySelectorAll('button')].find((one) => one.textContent === {text!r})"
    page.until(f"{button}?.checkVisibility() && !{button}.disabled")
    if not page.look("document.getElementById('confirm').open"):
        page.until("document.getElementById('operate').ariaBusy !== 'true'")
    page.look(f"{button}.click()")


def says(page: Page, id_: str, words: str) -> None:
    page.until(f"document.getElementById({id_!r}).textContent.includes({words!r})")


def test_without_the_key_the_page_reads_only(page: Page) -> None:
    page.until("!document.getElementById('key-form').hidden")
    visible = "[...document.querySelectorAll('button')].filter((one) => one.checkVisibility())"
    assert page.look(f"{visible}.map((one) => one.textContent)") == ["Pause", "Use it"]
    assert page.look(READ_ONLY)


def test_a_router_without_an_admin_key_is_said_to_change_nothing(
    browser: Browser, tmp_path: Path
) -> None:
    with keyed(tmp_path) as url:
        page = opened(browser, url)
        page.until("document.getElementById('no-key').checkVisibility()")
        assert page.look("document.getElementById('key-form').hidden")


@pytest.mark.parametrize("key", ["wrong", "with a space", "Schlüssel"])
def test_a_wrong_key_is_told_in_words_and_opens_nothing(key: str, page: Page) -> None:
    give_key(page, key)
    page.until("document.getElementById('failed').textContent !== ''")
    said = page.look("document.getElementById('failed').textContent")
    assert said in (
        "The router does not take this key: it is not the admin key.",
        "A key has no spaces, and no letters beyond ASCII.",
    )
    assert page.look(READ_ONLY)
    assert page.look("document.activeElement.id") == "key"


def test_a_server_is_drained_and_put_back(browser: Browser, url: str) -> None:
    page = unlocked(browser, url)
    click(page, "Drain base")
    says(page, "done", "base is drained: it gets nothing new.")
    assert drained(url) == ["base"]
    says(page, "servers", "drained, nothing left")
    says(page, "drains", "it can be restarted")
    says(page, "changes", "base is drained, was up")
    click(page, "Undrain base")
    says(page, "done", "base gets requests again.")
    assert drained(url) == []
    assert page.problems == []


def test_draining_the_last_server_is_asked_about_first(browser: Browser, url: str) -> None:
    page = unlocked(browser, url)
    click(page, "Drain base")
    says(page, "done", "base is drained")
    click(page, "Drain spec")
    page.until("document.getElementById('confirm').open")
    says(page, "confirm-text", "With spec drained, every request gets a 503")
    assert page.look("document.activeElement.id") == "confirm-no"
    page.press("Escape")
    page.until("!document.getElementById('confirm').open")
    assert drained(url) == ["base"]
    click(page, "Drain spec")
    click(page, "Leave it")
    page.until("!document.getElementById('confirm').open")
    assert drained(url) == ["base"]
    click(page, "Drain spec")
    click(page, "Drain it all the same")
    says(page, "done", "spec is drained")
    assert drained(url) == ["spec", "base"]
    says(page, "warnings", "No server takes requests: each gets a 503.")


def test_what_another_operator_has_just_drained_counts_too(browser: Browser, url: str) -> None:
    page = unlocked(browser, url)
    click(page, "Pause")
    post(url, "drain", {"server": "base", "drain": True})
    click(page, "Drain spec")
    page.until("document.getElementById('confirm').open")
    click(page, "Leave it")
    page.until("!document.getElementById('confirm').open")
    assert drained(url) == ["base"]


def test_a_policy_is_forced_for_a_while_and_undone(browser: Browser, url: str) -> None:
    page = unlocked(browser, url)
    page.until("document.getElementById('policy').options.length > 3")
    page.look("document.getElementById('policy').value = 'base-only'")
    page.look("document.getElementById('policy').dispatchEvent(new Event('change'))")
    assert page.look("document.getElementById('threshold').disabled")
    page.look("document.getElementById('minutes').value = '15'")
    click(page, "Put in force")
    says(page, "done", "Policy base-only is in force for 15 min 0 s.")
    assert state(url)["policy"]["override"]["policy"] == "base-only"
    page.until("/for 14 min [0-9]+ s more/.test(document.getElementById('override').textContent)")
    says(page, "mode", "Policy base-only")
    click(page, "Undo base-only")
    says(page, "done", "Policy marginal is in force again.")
    assert state(url)["policy"]["override"] is None
    page.until("document.getElementById('override').textContent === ''")
    assert page.look("document.activeElement.id") == "policy"
    assert page.problems == []


def test_a_policy_with_a_threshold_is_forced_with_it(browser: Browser, url: str) -> None:
    page = unlocked(browser, url)
    page.until("document.getElementById('policy').value === 'threshold'")
    page.look("document.getElementById('threshold').value = '4'")
    click(page, "Put in force")
    says(page, "done", "Policy threshold with threshold 4 is in force")
    assert state(url)["policy"]["override"]["threshold"] == 4


def test_a_value_that_the_router_refuses_is_told_in_its_words(browser: Browser, url: str) -> None:
    page = unlocked(browser, url)
    page.look("document.getElementById('override-form').noValidate = true")
    page.look("document.getElementById('minutes').value = '2000'")
    click(page, "Put in force")
    says(page, "failed", "'minutes' must be above 0, at most 1440, not 2000")
    assert state(url)["policy"]["override"] is None


def test_the_keyboard_alone_is_enough(page: Page, url: str) -> None:
    give_key(page)
    page.until(f"!{READ_ONLY}")
    assert page.look("document.activeElement.id") == "operate"
    page.press("Enter")  # once too often: no button is there to take it
    page.press("Tab")
    assert page.look("document.activeElement.textContent") == "Drain spec"
    page.press("Tab")
    assert page.look("document.activeElement.textContent") == "Drain base"
    page.press("Enter")
    says(page, "done", "base is drained")
    assert drained(url) == ["base"]
    # What is drawn every second takes the focus from nobody.
    says(page, "servers", "drained")
    assert page.look("document.activeElement.textContent") == "Undrain base"
    page.press("Enter")
    says(page, "done", "base gets requests again")


def test_a_screen_reader_finds_the_names_of_what_operates(browser: Browser, url: str) -> None:
    page = unlocked(browser, url)
    named = {
        (one["role"]["value"], one.get("name", {}).get("value", ""))
        for one in page.call("Accessibility.getFullAXTree")["nodes"]
        if "role" in one
    }
    for expected in (
        ("region", "Operate"), ("group", "Servers"), ("button", "Drain spec"), ("form", "Policy"),
        ("combobox", "Policy"), ("spinbutton", "Threshold"), ("spinbutton", "for minutes"),
        ("button", "Put in force"), ("button", "Forget the key"),
    ):  # fmt: skip
        assert expected in named
    assert page.look("document.getElementById('done').role") == "status"
    assert page.look("document.getElementById('failed').role") == "alert"


def test_the_key_is_in_memory_only_and_can_be_forgotten(browser: Browser, url: str) -> None:
    page = unlocked(browser, url)
    click(page, "Drain base")
    says(page, "done", "base is drained")
    assert ADMIN not in page.look(KEPT)
    click(page, "Forget the key")
    page.until(READ_ONLY)
    give_key(page)
    page.until(f"!{READ_ONLY}")
    page.call("Page.reload")
    page.until(f"{LIVE} && !document.getElementById('key-form').hidden")
    assert page.look(READ_ONLY)


def test_a_router_that_is_gone_is_told_where_something_was_asked_of_it(
    browser: Browser, tmp_path: Path
) -> None:
    with keyed(tmp_path, "admin") as url:
        page = unlocked(browser, url)
    click(page, "Drain base")
    says(page, "failed", "The router does not answer, so it may or may not have done it.")
    assert not page.look(READ_ONLY)


def test_with_client_keys_the_page_is_read_by_password_and_operated_by_the_admin_key(
    browser: Browser, tmp_path: Path
) -> None:
    with keyed(tmp_path, "admin", "client") as url:
        page = browser.page()
        page.call("Emulation.setFocusEmulationEnabled", enabled=True)
        page.open(f"{url.replace('//', f'//me:{CLIENT}@')}/crossover/", scheme="light")
        page.until(LIVE)  # although its address has a password, which fetch would not take
        page.open(f"{url}/crossover/", scheme="light")
        page.until(LIVE)  # the browser sends the password by itself
        give_key(page, CLIENT)
        says(page, "failed", "it is not the admin key")
        give_key(page, "wrong")
        says(page, "failed", "it is not the admin key")
        give_key(page)
        page.until(f"!{READ_ONLY}")
        click(page, "Drain base")
        says(page, "done", "base is drained")
        assert drained(url) == ["base"]


def test_a_password_that_is_no_key_opens_nothing(browser: Browser, tmp_path: Path) -> None:
    with keyed(tmp_path, "client") as url:
        page = browser.page()
        page.open(f"{url.replace('//', '//me:wrong@')}/crossover/", scheme="light")
        page.until("document.readyState === 'complete'")
        assert page.look("document.getElementById('link') === null")


def test_a_narrow_screen_needs_no_sideways_scrolling_to_operate(browser: Browser, url: str) -> None:
    page = opened(browser, url, width=360)
    give_key(page)
    page.until(f"!{READ_ONLY}")
    assert page.look("document.documentElement.scrollWidth") <= 360
