"""Requests that are for one server: by its name, or because it holds a stored response."""

import asyncio
import json

import pytest

from router.dataplane.relay import RelayLimits
from tests.integration.rig import ADMIN_KEY, CHAT, Call, Engine, Rig, running, until_set

pytestmark = pytest.mark.anyio

RESPONSES = "/v1/responses"
ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}


class Keeper:
    """An engine that keeps the responses that it makes, as SGLang does."""

    def __init__(self, *ids: str) -> None:
        self.engine = Engine(self._script)
        self.ids = set(ids)
        self.asked: list[str] = []

    async def _script(self, call: Call) -> None:
        path = call.target
        self.asked.append(f"{call.method} {path}")
        if path == RESPONSES:
            await self._create(call)
            return
        response_id = path.removeprefix(f"{RESPONSES}/").removesuffix("/cancel")
        if response_id in self.ids:
            await call.reply(json.dumps({"id": response_id}).encode())
        else:
            await call.reply(b'{"error": {"code": 404}}', 404)

    async def _create(self, call: Call) -> None:
        before = call.json.get("previous_response_id")
        if before is not None and before not in self.ids:
            await call.reply(b'{"error": {"code": 404}}', 404)
            return
        made = call.json["request_id"]
        self.ids.add(made)
        await call.reply(json.dumps({"id": made}).encode())


async def create(rig: Rig, **extra: object) -> tuple[str, str]:
    """Return the id of a new response, and the server that holds it."""
    answer = await rig.http.post(RESPONSES, json={"input": "hi", **extra})
    assert answer.status_code == 200, answer.text
    return answer.json()["id"], answer.headers["x-crossover-server"]


async def test_what_continues_reads_or_cancels_a_response_goes_where_it_is() -> None:
    spec, base = Keeper(), Keeper()
    engines = {"spec": spec.engine, "base": base.engine}
    async with running(engines=engines, policy="least-inflight") as rig:
        made = [await create(rig) for _ in range(4)]
        assert {server for _, server in made} == {"spec", "base"}
        for response_id, server in made:
            for method, path in (("GET", ""), ("POST", "/cancel")):
                answer = await rig.http.request(method, f"{RESPONSES}/{response_id}{path}")
                assert (answer.status_code, answer.json()) == (200, {"id": response_id})
                assert answer.headers["x-crossover-server"] == server
                assert answer.headers["x-crossover-reason"] == "stored"
            _, there = await create(rig, previous_response_id=response_id)
            assert there == server
        asked = [line for line in spec.asked if "GET" in line or "cancel" in line]
        assert len(asked) == 2 * [server for _, server in made].count("spec")
        await rig.settled()


async def test_a_response_that_is_not_known_is_asked_for_from_each_server_once() -> None:
    spec, base = Keeper(), Keeper("resp_old")
    async with running(engines={"spec": spec.engine, "base": base.engine}) as rig:
        for _ in range(2):
            _, server = await create(rig, previous_response_id="resp_old")
            assert server == "base"
        assert spec.asked == [f"GET {RESPONSES}/resp_old"]
        assert base.asked[0] == f"GET {RESPONSES}/resp_old"
        assert base.asked[1:] == [f"POST {RESPONSES}"] * 2


async def test_a_response_that_nobody_holds_is_a_404_that_says_why() -> None:
    spec, base = Keeper(), Keeper()
    async with running(engines={"spec": spec.engine, "base": base.engine}) as rig:
        await base.engine.stop()
        for answer in (
            await rig.http.get(f"{RESPONSES}/resp_lost"),
            await rig.http.post(RESPONSES, json={"previous_response_id": "resp_lost"}),
        ):
            assert answer.status_code == 404
            error = answer.json()["error"]
            assert error["code"] == "response_unknown"
            assert "'resp_lost'" in error["message"]
            assert "until they restart" in error["message"]
            assert error["message"].endswith("Not asked, because it did not answer: base.")


async def test_an_id_of_a_client_goes_into_a_path_escaped() -> None:
    spec, base = Keeper(), Keeper()
    async with running(engines={"spec": spec.engine, "base": base.engine}) as rig:
        body = {"previous_response_id": "../../flush_cache?x\r\n"}
        assert (await rig.http.post(RESPONSES, json=body)).status_code == 404
        assert spec.asked == [f"GET {RESPONSES}/..%2F..%2Fflush_cache%3Fx%0D%0A"]
        body = {"previous_response_id": "x" * 10_000}
        assert (await rig.http.post(RESPONSES, json=body)).status_code == 404
        assert len(spec.asked) == 1


async def test_a_client_that_leaves_while_servers_are_asked_is_let_go() -> None:
    asked = asyncio.Event()

    async def silent(call: Call) -> None:
        asked.set()
        await call.gone()

    engines = {"spec": Engine(silent), "base": Engine(silent)}
    async with running(engines=engines) as rig:
        body = b'{"previous_response_id": "resp_x"}'
        _, writer = await rig.post(RESPONSES, body)
        await asked.wait()
        writer.close()
        assert (await rig.record()).outcome == "client_disconnect"
        await rig.settled()


async def test_a_response_on_a_server_that_went_down_is_not_looked_for_elsewhere() -> None:
    spec, base = Keeper(), Keeper("resp_old")
    async with running(engines={"spec": spec.engine, "base": base.engine}) as rig:
        await create(rig, previous_response_id="resp_old")
        before = list(spec.asked)
        await base.engine.stop()
        body = {"previous_response_id": "resp_old"}
        answers = [await rig.http.post(RESPONSES, json=body) for _ in range(3)]
        assert {answer.status_code for answer in answers} <= {502, 503}
        error = answers[-1].json()["error"]
        assert error["code"] == "target_down"
        assert "base" in error["message"]
        assert spec.asked == before


async def test_the_admin_key_may_name_a_server_or_a_role() -> None:
    engines = {name: Engine() for name in ("spec", "base-1", "base-2")}
    async with running(engines=engines) as rig:
        for target, allowed in (("base-2", {"base-2"}), ("base", {"base-1", "base-2"})):
            headers = {**ADMIN, "x-crossover-target": target}
            servers = set()
            for _ in range(4):
                answer = await rig.http.post(CHAT, json={}, headers=headers)
                assert answer.headers["x-crossover-reason"] == "target"
                servers.add(answer.headers["x-crossover-server"])
            assert servers == allowed
        assert not rig.spec.calls


async def test_others_may_name_one_only_where_the_settings_allow_it() -> None:
    async with running() as rig:
        headers = {"x-crossover-target": "base"}
        refused = await rig.http.post(CHAT, json={}, headers=headers)
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "target_refused"
        assert not rig.spec.calls
        assert not rig.base.calls
        rig.relay.configure(RelayLimits(allow_target=True))
        allowed = await rig.http.post(CHAT, json={}, headers=headers)
        assert allowed.headers["x-crossover-server"] == "base"


async def test_an_unknown_target_is_a_400_that_lists_what_there_is() -> None:
    async with running(engines={"spec-a": Engine(), "base": Engine()}) as rig:
        headers = {**ADMIN, "x-crossover-target": "nobody"}
        answer = await rig.http.post(CHAT, json={}, headers=headers)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].endswith("must be one of spec-a, base, spec.")


async def test_a_target_that_is_down_is_a_503_and_nobody_else_gets_the_request() -> None:
    async with running() as rig:
        await rig.base.stop()
        headers = {**ADMIN, "x-crossover-target": "base"}
        statuses = [
            (await rig.http.post(CHAT, json={}, headers=headers)).status_code for _ in range(4)
        ]
        assert statuses[-1] == 503
        assert set(statuses) <= {502, 503}
        assert not rig.spec.calls


async def test_a_target_that_lacks_the_response_to_go_on_from_is_refused() -> None:
    spec, base = Keeper(), Keeper("resp_old")
    async with running(engines={"spec": spec.engine, "base": base.engine}) as rig:
        headers = {**ADMIN, "x-crossover-target": "spec"}
        body = {"previous_response_id": "resp_old"}
        answer = await rig.http.post(RESPONSES, json=body, headers=headers)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "response_elsewhere"


async def test_a_drained_server_gets_nothing_new_and_ends_what_it_has() -> None:
    go = asyncio.Event()
    async with running(engines={"spec": Engine(until_set(go)), "base": Engine()}) as rig:
        async with rig.http.stream("POST", CHAT, json={"stream": True}) as stream:
            chunks = stream.aiter_raw()
            await anext(chunks)
            rig.relay._steering.drained.add("spec")
            other = await rig.http.post(CHAT, json={})
            assert other.headers["x-crossover-server"] == "base"
            go.set()
            assert b"".join([chunk async for chunk in chunks]).endswith(b"[DONE]\n\n")
        assert len(rig.spec.calls) == 1

        rig.relay._steering.drained.add("base")
        refused = await rig.http.post(CHAT, json={})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "drained"
        assert "spec, base is drained" in refused.json()["error"]["message"]

        headers = {**ADMIN, "x-crossover-target": "spec"}
        tried = await rig.http.post(CHAT, json={"stream": True}, headers=headers)
        assert tried.headers["x-crossover-server"] == "spec"
