"""The real command with its learnt policy, in front of simulated engines on real sockets."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtest.children import free_port
from loadtest.engines import ENGINES
from loadtest.sim_server import EngineSpec, SimOptions, SimServer
from router.core.calibration import Calibration
from router.core.types import Layout
from tests.integration.processes import Router, client_of, ready, router
from tests.integration.rig import Call, Engine, running

pytestmark = pytest.mark.anyio

DEADLINE_S = 40.0
MODELS = {"spec": "h200-tree-v1", "base": "h200-plain"}


@asynccontextmanager
async def engines(layout: Layout = Layout.DISJOINT) -> AsyncIterator[SimServer]:
    specs = [EngineSpec(name, ENGINES[model], free_port()) for name, model in MODELS.items()]
    async with SimServer(specs, SimOptions(layout=layout)) as server:
        yield server


def urls_of(server: SimServer) -> tuple[str, ...]:
    return ("--spec-url", server.urls["spec"], "--base-url", server.urls["base"])


async def stream(client: httpx.AsyncClient, tokens: int = 60, **headers: str) -> httpx.Response:
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "m", "messages": messages, "max_tokens": tokens, "stream": True}
    return await client.post("/v1/chat/completions", json=body, headers=headers)


async def told(client: httpx.AsyncClient, name: str) -> dict[str, Any]:
    answer = (await client.get(f"/crossover/{name}")).json()
    assert isinstance(answer, dict)
    return answer


def windows(model: dict[str, Any]) -> dict[str, int]:
    return {name: server["windows"] for name, server in model["servers"].items()}


async def serve_until_learnt(client: httpx.AsyncClient) -> dict[str, Any]:
    """Send requests, two at a time, until something is known of both servers."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            await asyncio.gather(stream(client), stream(client))
            model = await told(client, "model")
            if min(windows(model).values()):
                return model


async def test_it_learns_both_servers_speed_and_shows_it(tmp_path: Path) -> None:
    state_file = tmp_path / "state.json"
    async with engines() as server, router(*urls_of(server)) as made, client_of(made) as client:
        await ready(client, "spec", "base")
        first = await stream(client)
        assert first.headers["x-crossover-reason"] == "unmeasured"
        model = await serve_until_learnt(client)
        for name in MODELS:
            (alone,) = [p for p in model["servers"][name]["tpot"] if p["sequences"] == 1]
            # 5 ms a token, on whatever machine this is.
            assert 0.002 < alone["s"] < 0.05
            assert alone["low_s"] <= alone["s"] <= alone["high_s"]
        assert model["crossover"] is not None
        learnt = await stream(client)
        assert learnt.headers["x-crossover-reason"] in ("marginal", "explore", "affinity")

        metrics = (await client.get("/metrics")).text
        for name in MODELS:
            labels = f'role="{name}",server="{name}"'
            rate = f'router_model_throughput_tokens_per_second{{bound="estimate",{labels}}}'
            assert rate in metrics
        assert "router_crossover_concurrency" in metrics
        await shown_on_a_screen(made)
    assert not state_file.exists()


async def shown_on_a_screen(made: Router) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "router", "status", "--url", made.url,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(DEADLINE_S):
        out, error = await process.communicate()
    assert (process.returncode, error) == (0, b"")
    text = out.decode()
    assert "policy marginal (summed), layout disjoint" in text
    assert "tok/s of one sequence" in text
    assert "\x1b" not in text


async def test_requests_of_other_clients_are_seen_in_the_engines_own_count() -> None:
    async with engines() as server, router(*urls_of(server)) as made, client_of(made) as client:
        await ready(client, "spec", "base")
        async with httpx.AsyncClient(base_url=server.urls["base"], trust_env=False) as aside:
            body = {"model": "m", "prompt": "hi", "max_tokens": 8_000, "stream": True}
            async with (
                asyncio.timeout(DEADLINE_S),
                aside.stream("POST", "/v1/completions", json=body) as answer,
            ):
                chunks = answer.aiter_raw()
                await anext(chunks)
                base = (await told(client, "state"))["servers"][1]
                while base["engine"] is None or base["engine"]["running"] != 1:
                    await anext(chunks)
                    base = (await told(client, "state"))["servers"][1]
        assert base["load"]["sequences"] == 0
        assert base["engine"]["queued"] == 0
        assert 0 <= base["engine"]["token_usage"] < 1
        assert base["engine"]["switch"] is None
        metrics = (await client.get("/metrics")).text
        assert 'router_engine_sequences{role="base",server="base",state="running"}' in metrics
        assert 'router_signal_age_seconds{role="base",server="base"}' in metrics


async def test_what_it_learnt_outlives_a_restart_and_a_stale_file_does_not(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    async with engines() as server:
        arguments = (*urls_of(server), "--state-file", str(path))
        async with router(*arguments) as made, client_of(made) as client:
            await ready(client, "spec", "base")
            await serve_until_learnt(client)
            assert await made.terminate() == 0
        saved = json.loads(path.read_text())
        assert saved["model"] == "crossover-sim"
        assert {each["engine_version"] for each in saved["servers"]} == {"0.5.12.post1"}

        async with router(*arguments) as made, client_of(made) as client:
            await ready(client, "spec", "base")
            learnt = await stream(client)
            assert learnt.headers["x-crossover-reason"] in ("marginal", "explore", "affinity")
            assert await made.terminate() == 0

        path.write_text(path.read_text().replace("0.5.12.post1", "0.4.0"))
        async with router(*arguments) as made, client_of(made) as client:
            await ready(client, "spec", "base")
            async with asyncio.timeout(DEADLINE_S):
                while not made.logged(logger="crossover.learning", level="warning"):
                    await told(client, "state")
            refused = made.logged(logger="crossover.learning", level="warning")
            assert "engine_version is '0.4.0', but spec runs '0.5.12.post1'" in str(refused)
            async with asyncio.timeout(DEADLINE_S):
                while (await told(client, "model"))["crossover"] is not None:
                    await told(client, "state")
            assert (await stream(client)).headers["x-crossover-reason"] == "unmeasured"


async def test_a_corrupt_state_file_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_text('{"schema": 1, "serv')
    arguments = ("--base-url", "http://127.0.0.1:9", "--state-file", str(path))
    async with router(*arguments) as made:
        (warning,) = made.logged(logger="crossover", level="warning")
        assert "not JSON" in str(warning["message"])
        assert "starting fresh" in str(warning["message"])
        assert await made.terminate() == 0
    assert not path.exists()
    assert path.with_name("state.json.corrupt").read_text() == '{"schema": 1, "serv'


async def test_a_calibration_is_what_it_starts_from(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    points = {
        "spec": [{"sequences": 1, "s": 0.004}, {"sequences": 64, "s": 0.02}],
        "base": [{"sequences": 1, "s": 0.005}, {"sequences": 64, "s": 0.008}],
    }
    servers = [{"role": role, "tpot": tpot} for role, tpot in points.items()]
    path.write_text(json.dumps({"schema": 1, "servers": servers}))
    async with engines() as server:
        arguments = (*urls_of(server), "--calibration", str(path))
        async with router(*arguments) as made, client_of(made) as client:
            await ready(client, "spec", "base")
            model = await told(client, "model")
            assert 1 < model["crossover"] < 64
            assert (await stream(client)).headers["x-crossover-server"] == "spec"


class Patched:
    """Answers as SGLang with the plugin does, as far as it is asked here."""

    def __init__(self) -> None:
        self.switch: object = {
            "state": "active", "mode": "off", "threshold": 1, "enable_threshold": 1,
            "off_share": 0.25,
        }  # fmt: skip

    async def answer(self, call: Call) -> None:
        rank = {"num_running_reqs": 3, "num_waiting_reqs": 0, "spec_switch": self.switch}
        bodies: dict[str, object] = {
            "/v1/loads": {"loads": [rank]},
            "/v1/models": {"data": [{"id": "m", "max_model_len": 4096}]},
            "/server_info": {"version": "0.5.12.post1", "speculative_algorithm": "EAGLE3"},
        }
        await call.reply(json.dumps(bodies.get(call.target, {"ok": True})).encode())


async def test_the_switch_of_a_patched_server_is_shown_and_nonsense_is_not() -> None:
    patched = Patched()
    engine = Engine(patched.answer)
    await engine.start()
    async with router("--spec-url", engine.url) as made, client_of(made) as client:
        await ready(client, "spec")

        async def switch() -> object:
            (server,) = (await told(client, "state"))["servers"]
            return None if server["engine"] is None else server["engine"]["switch"]

        async with asyncio.timeout(DEADLINE_S):
            while await switch() is None:
                pass
        assert await switch() == patched.switch
        metrics = (await client.get("/metrics")).text
        spec = 'role="spec",server="spec"'
        assert f'router_engine_switch_state{{{spec},state="active"}} 1.0' in metrics
        assert f"router_engine_speculates{{{spec}}} 0.0" in metrics
        assert f"router_engine_off_share_ratio{{{spec}}} 0.25" in metrics
        assert (await told(client, "model"))["servers"]["spec"]["threshold"] == 1
        await client.post("/v1/completions", json={"prompt": "hi"})
        (decision,) = (await told(client, "decisions"))["decisions"]
        assert decision["mode"] == "on"

        patched.switch = {"state": "active", "mode": "sideways", "threshold": -3}
        async with asyncio.timeout(DEADLINE_S):
            while await switch() is not None:
                pass
        assert (await told(client, "model"))["servers"]["spec"]["threshold"] is None
    await engine.stop()
    assert engine.errors == []


async def test_a_conversation_stays_with_its_server_where_that_costs_little() -> None:
    points = [{"sequences": n, "s": 0.005 + n / 20_000, "windows": 20} for n in (1, 2, 4, 8)]
    servers = [{"role": role, "tpot": points} for role in MODELS]
    calibration = Calibration.from_json({"schema": 1, "servers": servers}, "test")
    held, release = asyncio.Event(), asyncio.Event()

    async def hold(call: Call) -> None:
        if "hold" in call.target:
            held.set()
            await release.wait()
        await call.reply(b"{}")

    engines = {name: Engine(hold) for name in MODELS}
    async with running(engines=engines, policy="marginal", calibration=calibration) as rig:

        async def ask(session: str, query: str = "") -> tuple[str, str]:
            headers = {"x-crossover-session": session}
            json = {"prompt": "hi", "max_tokens": 8}
            answer = await rig.http.post(f"/v1/completions{query}", json=json, headers=headers)
            return answer.headers["x-crossover-server"], answer.headers["x-crossover-reason"]

        home, _ = await ask("s-1")
        # Its home is the busy one now, and another server idle.
        holding = asyncio.create_task(ask("s-1", "?hold"))
        await asyncio.wait_for(held.wait(), DEADLINE_S)
        assert await ask("s-1") == (home, "affinity")
        other, reason = await ask("s-2")
        assert (other != home, reason) == (True, "marginal")
        release.set()
        assert (await holding)[0] == home


async def test_a_pair_declared_disjoint_that_shares_its_gpus_is_reported() -> None:
    async with (
        engines(Layout.SHARED) as server,
        router(*urls_of(server)) as made,
        client_of(made) as client,
    ):
        await ready(client, "spec", "base")
        over = asyncio.Event()

        async def load() -> None:
            while not over.is_set():
                await stream(client, tokens=150)

        loads = [asyncio.create_task(load()) for _ in range(6)]
        async with asyncio.timeout(2 * DEADLINE_S):
            while (await told(client, "state"))["layout_warning"] is None:
                await stream(client, tokens=20)
        over.set()
        await asyncio.gather(*loads)
        warning = (await told(client, "state"))["layout_warning"]
        assert "layout is disjoint" in warning
        assert made.logged(logger="crossover.learning", message=warning)
        assert "router_layout_suspect 1.0" in (await client.get("/metrics")).text
