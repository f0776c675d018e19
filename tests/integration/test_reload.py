"""SIGHUP on the real command: settings change while requests run, or nothing does."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.processes import POLL_S, Router, client_of, ready, router, until
from tests.integration.rig import CHAT, DONE, Call, Engine, event

pytestmark = pytest.mark.anyio

LOADED_AT = "router_config_last_reload_success_timestamp_seconds"


@dataclass
class Reloading:
    """A router on a settings file, before two engines whose streams end when they are let go."""

    made: Router
    client: httpx.AsyncClient
    engines: dict[str, Engine]
    path: Path
    go: asyncio.Event

    def write(self, *lines: str) -> None:
        urls = [f"{name}_url: {engine.url}" for name, engine in self.engines.items()]
        self.path.write_text("\n".join([*urls, *lines]) + "\n")

    async def reload(self, *lines: str) -> None:
        """Write the file, ask for it to be read, and wait until that was done."""
        before = len(self.told())
        self.write(*lines)
        self.made.signal(signal.SIGHUP)
        await until(lambda: len(self.told()) > before)

    def told(self) -> list[str]:
        """Return what was said last of each reload."""
        ends = ("nothing has changed", "no setting in force", " -> ")
        return [line for line in self.warned() if any(end in line for end in ends)]

    def warned(self) -> list[str]:
        return [str(line["message"]) for line in self.made.logged(logger="crossover.reload")]

    async def chat(self) -> httpx.Response:
        return await self.client.post(CHAT, json={})

    async def metric(self, name: str) -> float:
        text = (await self.client.get("/metrics")).text
        samples = [s for f in text_string_to_metric_families(text) for s in f.samples]
        (value,) = [sample.value for sample in samples if sample.name == name]
        return value

    async def state(self) -> dict[str, Any]:
        answer: dict[str, Any] = (await self.client.get("/crossover/state")).json()
        return answer


@contextlib.asynccontextmanager
async def reloading(tmp_path: Path, *lines: str) -> AsyncIterator[Reloading]:
    go = asyncio.Event()

    async def script(call: Call) -> None:
        if call.target != CHAT or not call.json.get("stream"):
            await call.reply(b'{"ok": true}')
            return
        await call.stream_head()
        await call.chunk(event("one"))
        await go.wait()
        await call.chunk(DONE)
        await call.end()

    engines = {"spec": Engine(script), "base": Engine(script)}
    for engine in engines.values():
        await engine.start()
    path = tmp_path / "crossover.yaml"
    try:
        made = Reloading(Router.__new__(Router), httpx.AsyncClient(), engines, path, go)
        made.write(*lines)
        async with router("--config", str(path)) as process, client_of(process) as client:
            await made.client.aclose()
            made.made, made.client = process, client
            await ready(client, "spec", "base")
            yield made
            assert await process.terminate() == 0
            assert process.errors == []
    finally:
        go.set()
        for engine in engines.values():
            await engine.stop()


async def test_a_reload_changes_the_policy_and_drops_no_stream(tmp_path: Path) -> None:
    async with reloading(tmp_path, "policy: spec-only") as it:
        async with it.client.stream("POST", CHAT, json={"stream": True}) as stream:
            chunks = stream.aiter_raw()
            await anext(chunks)
            loaded_at = await it.metric(LOADED_AT)
            await it.reload("policy: threshold", "threshold: 0")
            assert (await it.chat()).headers["x-crossover-reason"] == "above_threshold"
            policy = (await it.state())["policy"]
            assert (policy["name"], policy["threshold"]) == ("threshold", 0)
            assert await it.metric("router_config_last_reload_successful") == 1
            later = await it.metric(LOADED_AT)
            assert later > loaded_at
            it.go.set()
            assert b"".join([chunk async for chunk in chunks]).endswith(DONE)
        (line,) = it.told()
        assert f"policy spec-only -> threshold ({it.path}:3 policy)" in line
        assert f"threshold 8 -> 0 ({it.path}:4 threshold)" in line


async def test_an_invalid_file_changes_nothing_and_says_so_as_a_start_does(tmp_path: Path) -> None:
    async with reloading(tmp_path, "policy: spec-only") as it:
        await it.reload("policy: base-only", "treshold: 4", "port: http")
        assert it.warned()[:2] == [
            f"reload: {it.path}:4 treshold: unknown, did you mean threshold?",
            f"reload: {it.path}:5 port: 'http' is not allowed, expected an integer from 0 to 65535",
        ]
        assert await it.metric("router_config_last_reload_successful") == 0
        assert (await it.state())["settings_latest"] is False
        assert (await it.chat()).headers["x-crossover-server"] == "spec"

        await it.reload("policy: base-only")
        assert await it.metric("router_config_last_reload_successful") == 1
        assert (await it.chat()).headers["x-crossover-server"] == "base"


async def test_what_needs_a_restart_is_named_and_stays(tmp_path: Path) -> None:
    async with reloading(tmp_path, "policy: spec-only") as it:
        it.engines["spec"], it.engines["base"] = it.engines["base"], it.engines["spec"]
        await it.reload("policy: base-only", "log_format: json", "layout: shared")
        it.engines["spec"], it.engines["base"] = it.engines["base"], it.engines["spec"]
        stays = "cannot change without a restart, and stays as it was"
        told = [line for line in it.warned() if line.endswith(stays)]
        assert f"reload: {it.path}:4 log_format {stays}" in told
        assert f"reload: {it.path}:5 layout {stays}" in told
        assert f"reload: servers {stays}" in told
        assert (await it.state())["layout"] == "disjoint"
        assert (await it.chat()).headers["x-crossover-server"] == "base"
        assert len(it.engines["base"].calls) > len(it.engines["spec"].calls)


async def test_time_limits_hold_for_streams_that_run_already(tmp_path: Path) -> None:
    async with reloading(tmp_path, "policy: spec-only") as it:
        async with it.client.stream("POST", CHAT, json={"stream": True}) as stream:
            chunks = stream.aiter_raw()
            read = [await anext(chunks)]
            await it.reload("policy: spec-only", "idle_timeout_s: 1")
            with pytest.raises(httpx.RemoteProtocolError):
                await _read_on(chunks, read)
        assert b"idle_timeout" in b"".join(read)


async def _read_on(chunks: AsyncIterator[bytes], into: list[bytes]) -> None:
    async for chunk in chunks:
        into.append(chunk)  # noqa: PERF401  (what came before an error counts)


async def test_the_log_level_changes(tmp_path: Path) -> None:
    async with reloading(tmp_path, "policy: spec-only") as it:
        before = await it.metric(LOADED_AT)
        it.write("policy: spec-only", "log_level: error")
        it.made.signal(signal.SIGHUP)
        while await it.metric(LOADED_AT) == before:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        await it.client.post(CHAT, json={}, headers={"x-request-id": "quiet"})
        await it.reload("policy: spec-only", "log_level: info")
        await it.client.post(CHAT, json={}, headers={"x-request-id": "loud"})
        await until(lambda: it.made.logged(request_id="loud"))
        assert not it.made.logged(request_id="quiet")


async def test_a_reload_keeps_health_as_it_is_and_goes_on_watching(tmp_path: Path) -> None:
    """A reload that begins with all servers up again, or with none, sends requests astray."""
    lines = ("policy: base-only", "probe_interval_s: 1")
    async with reloading(tmp_path, *lines) as it:
        await it.engines["base"].stop()
        await ready(it.client, "spec")
        await it.reload(*lines, "dwell_s: 3")
        answer = await it.chat()
        assert answer.headers["x-crossover-server"] == "spec"
        up = [server["up"] for server in (await it.state())["servers"]]
        assert up == [True, False]


async def test_reloads_in_a_row_end_with_the_file_as_it_is(tmp_path: Path) -> None:
    async with reloading(tmp_path, "policy: spec-only") as it:
        for threshold in range(1, 6):
            it.write("policy: threshold", f"threshold: {threshold}")
            it.made.signal(signal.SIGHUP)

        while (await it.state())["policy"]["threshold"] != 5:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
