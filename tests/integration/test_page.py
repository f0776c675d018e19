"""The live page's files and what they ask for, as a client sees them."""

import re
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx
import pytest
from fastapi import FastAPI, Request, Response

from router.core.breaker import BreakerState
from router.core.types import Reason
from router.dataplane.control import PATHS
from router.dataplane.page import AGE_S_MAX, PAGE, PAGE_PATHS, Kept, add_page

pytestmark = pytest.mark.anyio

Ask = Callable[..., Awaitable[int]]

FILES = [PAGE, f"{PAGE}page.css", f"{PAGE}page.js", f"{PAGE}operate.js"]


class Clock:
    """Stands still until it is set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def client(clock: Clock) -> AsyncIterator[httpx.AsyncClient]:
    app = FastAPI()
    add_page(app)
    count = iter(range(1000))
    kept = Kept(lambda: {"computed": next(count)}, clock)

    @app.get("/crossover/state")
    async def state(request: Request) -> Response:
        return kept.answer(request)

    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        yield client


@pytest.fixture
def computed(client: httpx.AsyncClient) -> Ask:
    async def ask(cache_control: str = "max-age=1") -> int:
        answer = await client.get("/crossover/state", headers={"cache-control": cache_control})
        number: int = answer.json()["computed"]
        return number

    return ask


@pytest.mark.parametrize("path", FILES)
async def test_every_file_allows_only_what_is_its_own(path: str, client: httpx.AsyncClient) -> None:
    answer = await client.get(path)
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    assert "http" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", FILES)
async def test_a_file_that_a_browser_has_is_not_sent_again(
    path: str, client: httpx.AsyncClient
) -> None:
    etag = (await client.get(path)).headers["etag"]
    again = await client.get(path, headers={"if-none-match": etag})
    assert (again.status_code, again.content) == (304, b"")
    assert (await client.get(path, headers={"if-none-match": '"old"'})).status_code == 200


@pytest.mark.parametrize("path", FILES)
async def test_no_file_names_another_host(path: str, client: httpx.AsyncClient) -> None:
    addresses = set(re.findall(r"\w+://[^\s\"'`]+", (await client.get(path)).text))
    assert addresses <= {"http://www.w3.org/2000/svg"}  # a name, not a place


async def test_the_page_without_its_slash_leads_to_it(client: httpx.AsyncClient) -> None:
    answer = await client.get("/crossover")
    assert (answer.status_code, answer.headers["location"]) == (308, PAGE)


async def test_the_page_can_say_every_reason(client: httpx.AsyncClient) -> None:
    script = (await client.get(f"{PAGE}page.js")).text
    table = script.split("const REASONS = {", 1)[1].split("};", 1)[0]
    assert re.findall(r"^  (\w+):", table, re.MULTILINE) == [reason.value for reason in Reason]


async def test_the_page_has_words_for_every_breaker_that_is_not_closed(
    client: httpx.AsyncClient,
) -> None:
    script = (await client.get(f"{PAGE}page.js")).text
    table = script.split("const BREAKERS = {", 1)[1].split("};", 1)[0]
    words = re.findall(r"^  (\w+):", table, re.MULTILINE)
    assert words == [each.value for each in BreakerState if each is not BreakerState.CLOSED]


def test_the_page_is_the_routers_and_never_an_engines() -> None:
    assert PAGE_PATHS <= PATHS


async def test_twenty_pages_cost_one_computation_a_second(clock: Clock, computed: Ask) -> None:
    seen = []
    for tick in range(50):  # five seconds, in which each page asks every second
        clock.now = 100.0 + tick / 10
        seen += [await computed() for page in range(20) if page % 10 == tick % 10]
    assert len(seen) == 100
    assert len(set(seen)) == 5


async def test_who_names_no_age_gets_what_holds_now(computed: Ask) -> None:
    assert [await computed(""), await computed("no-cache"), await computed("max-age=0")] == [
        0,
        1,
        2,
    ]


async def test_no_answer_is_older_than_a_second_whatever_a_client_would_take(
    clock: Clock, computed: Ask
) -> None:
    assert await computed("max-age=3600") == 0
    clock.now += AGE_S_MAX
    assert await computed("max-age=3600") == 1
