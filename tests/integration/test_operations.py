"""What operators do to the real command while it serves: drain, upgrade, override."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from loadtest.children import free_port
from tests.integration.processes import POLL_S, Router, chat, client_of, engine, ready, router

pytestmark = pytest.mark.anyio

ADMIN = {"authorization": "Bearer hunter2"}
DRAIN = "/crossover/drain"
POLICY = "/crossover/policy"
WORKERS = 4


@contextlib.asynccontextmanager
async def serving(
    tmp_path: Path, ports: dict[str, int], *arguments: str
) -> AsyncIterator[tuple[Router, httpx.AsyncClient]]:
    """A router whose engines are started by the test."""
    key = tmp_path / "admin"
    key.write_text("hunter2")
    urls = [f"--{name}-url=http://127.0.0.1:{port}" for name, port in ports.items()]
    arguments = (*urls, "--admin-key-file", str(key), *arguments)
    async with router(*arguments) as made, client_of(made) as client:
        yield made, client
        assert await made.terminate() == 0
    assert made.errors == []


@contextlib.asynccontextmanager
async def both(tmp_path: Path, *arguments: str) -> AsyncIterator[tuple[Router, httpx.AsyncClient]]:
    ports = {"spec": free_port(), "base": free_port()}
    async with (
        engine("spec", ports["spec"]),
        engine("base", ports["base"]),
        serving(tmp_path, ports, *arguments) as (made, client),
    ):
        await ready(client, "spec", "base")
        yield made, client


async def drain(client: httpx.AsyncClient, server: str, *, on: bool) -> int:
    """Drain a server, or end that; return how many sequences it still has."""
    body = {"server": server, "drain": on}
    answer = await client.post(DRAIN, json=body, headers=ADMIN)
    assert answer.status_code == 200, answer.text
    assert answer.json()["drained"] is on
    sequences = answer.json()["sequences"]
    assert isinstance(sequences, int)
    return sequences


async def shown(client: httpx.AsyncClient) -> dict[str, bool]:
    state = (await client.get("/crossover/state")).json()
    return {server["name"]: server["drained"] for server in state["servers"]}


async def test_a_drained_server_is_shown_as_such_and_gets_nothing_until_it_is_back(
    tmp_path: Path,
) -> None:
    async with both(tmp_path, "--policy", "spec-only") as (_, client):
        await drain(client, "spec", on=True)
        assert await shown(client) == {"spec": True, "base": False}
        metrics = (await client.get("/metrics")).text
        assert 'router_server_drained{role="spec",server="spec"} 1.0' in metrics
        assert (await chat(client)).headers["x-crossover-server"] == "base"

        await drain(client, "base", on=True)
        refused = await chat(client)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "drained")
        not_ready = await client.get("/readyz")
        assert not_ready.status_code == 503
        assert not_ready.json()["reason"] == "every server that is up is drained"

        await drain(client, "spec", on=False)
        assert (await client.get("/readyz")).status_code == 200
        assert (await chat(client)).headers["x-crossover-server"] == "spec"


async def test_one_server_after_the_other_is_upgraded_without_a_failed_request(
    tmp_path: Path,
) -> None:
    """The procedure of docs/operations.md, under load."""
    ports = {"spec": free_port(), "base": free_port()}
    answers: Counter[tuple[int, str]] = Counter()
    stop = asyncio.Event()

    async def work(client: httpx.AsyncClient, number: int) -> None:
        while not stop.is_set():
            streamed = await chat(client, stream=bool(number % 2), max_tokens=8)
            ended = not number % 2 or streamed.text.endswith("data: [DONE]\n\n")
            server = streamed.headers["x-crossover-server"]
            answers[streamed.status_code if ended else 0, server] += 1

    async def served_by(server: str, more: int) -> None:
        wanted = answers[200, server] + more
        while answers[200, server] < wanted:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)

    async with contextlib.AsyncExitStack() as stack:
        engines = {}
        for name, port in ports.items():
            engines[name] = await stack.enter_async_context(contextlib.AsyncExitStack())
            await engines[name].enter_async_context(engine(name, port))
        _, client = await stack.enter_async_context(
            serving(tmp_path, ports, "--policy", "least-inflight", "--slow-start-s", "0")
        )
        await ready(client, "spec", "base")
        workers = [asyncio.create_task(work(client, number)) for number in range(WORKERS)]
        try:
            async with asyncio.timeout(40):
                await served_by("spec", 5)
                for name, other in (("spec", "base"), ("base", "spec")):
                    while await drain(client, name, on=True):  # noqa: ASYNC110
                        await asyncio.sleep(POLL_S)
                    await engines[name].aclose()
                    await served_by(other, 5)
                    await engines[name].enter_async_context(engine(name, ports[name]))
                    await ready(client, "spec", "base")
                    headers = {**ADMIN, "x-crossover-target": name}
                    tried = await client.post(
                        "/v1/chat/completions", json={"messages": []}, headers=headers
                    )
                    assert tried.headers["x-crossover-server"] == name
                    await drain(client, name, on=False)
                    await served_by(name, 5)
        finally:
            stop.set()
            await asyncio.gather(*workers)
    assert {status for status, _ in answers} == {200}


async def test_an_override_of_the_policy_shows_and_can_be_undone(tmp_path: Path) -> None:
    async with both(tmp_path, "--policy", "spec-only") as (_, client):
        body = {"policy": "base-only", "minutes": 5}
        assert (await client.post(POLICY, json=body, headers=ADMIN)).status_code == 200
        answer = await chat(client)
        assert answer.headers["x-crossover-server"] == "base"
        assert answer.headers["x-crossover-reason"] == "override"
        policy = (await client.get("/crossover/state")).json()["policy"]
        assert (policy["name"], policy["configured"]) == ("base-only", "spec-only")
        assert 0 < policy["override"]["remaining_s"] <= 300

        for undo in (
            client.delete(POLICY, headers=ADMIN),
            client.post(POLICY, json={"policy": None}, headers=ADMIN),
        ):
            assert (await undo).json() == {"override": None}
            assert (await chat(client)).headers["x-crossover-reason"] == "fixed"
            await client.post(POLICY, json=body, headers=ADMIN)


async def test_an_override_ends_by_itself(tmp_path: Path) -> None:
    async with both(tmp_path, "--policy", "spec-only") as (_, client):
        body = {"policy": "base-only", "minutes": 0.005}
        answer = await client.post(POLICY, json=body, headers=ADMIN)
        assert answer.json()["override"]["remaining_s"] == 0.3
        async with asyncio.timeout(20):
            while (await client.get("/crossover/state")).json()["policy"]["override"]:  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
        assert (await chat(client)).headers["x-crossover-server"] == "spec"


async def test_a_threshold_alone_can_be_overridden(tmp_path: Path) -> None:
    async with both(tmp_path, "--policy", "threshold", "--threshold", "8") as (_, client):
        assert (await chat(client)).headers["x-crossover-server"] == "spec"
        body = {"threshold": 0, "minutes": 5}
        answer = await client.post(POLICY, json=body, headers=ADMIN)
        assert answer.json()["override"]["threshold"] == 0
        assert (await chat(client)).headers["x-crossover-server"] == "base"


async def test_what_makes_no_sense_is_refused_in_words_and_changes_nothing(
    tmp_path: Path,
) -> None:
    bad: list[tuple[str, object, str]] = [
        (DRAIN, {"server": "nobody", "drain": True}, "'server' must be one of spec, base."),
        (DRAIN, {"server": ["spec"], "drain": True}, "'server' must be one of spec, base."),
        (DRAIN, {"server": "spec", "drain": "yes"}, "'drain' must be true or false."),
        (DRAIN, {"server": "spec"}, "'drain' must be true or false."),
        (DRAIN, {"server": "spec", "drain": True, "minutes": 1}, "Only these keys are known"),
        (DRAIN, [1], "The body must be a JSON object."),
        (POLICY, {"policy": "best", "minutes": 1}, "'policy' must be one of threshold, spec-only"),
        (POLICY, {"policy": "spec-only"}, "'minutes' must be a number above 0, at most 1440."),
        (POLICY, {"policy": "spec-only", "minutes": 0}, "at most 1440, not 0."),
        (POLICY, {"policy": "spec-only", "minutes": 1441}, "at most 1440, not 1441."),
        (POLICY, {"policy": "spec-only", "minutes": True}, "'minutes' must be a number"),
        (POLICY, {"minutes": 1}, "'policy' or 'threshold' is missing."),
        (POLICY, {"threshold": 4, "minutes": 1}, "Policy spec-only has no threshold"),
        (POLICY, {"policy": "split", "threshold": -1, "minutes": 1}, "an integer from 0 to"),
    ]
    async with both(tmp_path, "--policy", "spec-only") as (_, client):
        for path, body, message in bad:
            answer = await client.post(path, json=body, headers=ADMIN)
            assert answer.status_code == 400, body
            assert message in answer.json()["error"]["message"]
        assert await shown(client) == {"spec": False, "base": False}
        for method, path in (("POST", DRAIN), ("POST", POLICY), ("DELETE", POLICY)):
            answer = await client.request(method, path)
            assert answer.status_code == 403
            assert answer.headers["x-crossover-error"] == "admin_key_needed"
