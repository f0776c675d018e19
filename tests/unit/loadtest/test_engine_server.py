"""The simulated engines as a process: clock, layout, connections, command line."""

import asyncio
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from loadtest.engines import ENGINES
from loadtest.sim_server import EngineSpec, SimOptions, SimServer, main, parse_spec
from router.core.types import Layout

PAIR = [EngineSpec("spec", ENGINES["h200-tree-v1"]), EngineSpec("base", ENGINES["h200-plain"])]
BODY = {"prompt": "x", "max_tokens": 400, "ignore_eos": True}
CLOCK = 50.0


async def ask(url: str, **more: object) -> httpx.Response:
    async with httpx.AsyncClient(base_url=url, timeout=20) as client:
        return await client.post("/v1/completions", json={**BODY, **more})


async def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


async def info(url: str) -> dict[str, object]:
    async with httpx.AsyncClient(base_url=url) as client:
        simulation: dict[str, object] = (await client.get("/server_info")).json()["simulation"]
        return simulation


async def switch(url: str) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=url) as client:
        (load,) = (await client.get("/v1/loads")).json()["loads"]
        told: dict[str, Any] = load["spec_switch"]
        return told


async def test_a_faster_clock_runs_through_the_same_model_time() -> None:
    async with SimServer(PAIR, SimOptions(clock=CLOCK)) as server:
        driver = server.drivers["base"]
        began_s = driver.now()
        await ask(server.urls["base"])
        # 400 tokens of 4.9 ms each.
        assert driver.now() - began_s > 1.9
        assert driver.metrics.e2e_s.sum > 1.9


async def test_it_says_which_model_it_is_and_how_far_behind() -> None:
    async with SimServer(PAIR, SimOptions(clock=CLOCK)) as server:
        await ask(server.urls["spec"])
        said = await info(server.urls["spec"])
    assert said["engine"] == "h200-tree-v1"
    assert said["clock"] == CLOCK
    assert said["interpolated"] is False
    assert said["steps"] == server.drivers["spec"].lag.steps > 100
    assert {"lag_mean_s", "lag_max_s", "slipped_s"} <= set(said)


async def test_an_engine_with_the_plugin_says_what_it_does_as_the_plugin_would() -> None:
    engine = parse_spec("spec=h200-chain-v2@1:0")
    async with SimServer([engine], SimOptions(clock=CLOCK)) as server:
        url = server.urls["spec"]
        before = await switch(url)
        assert (before["state"], before["threshold"]) == ("armed", 1)
        both = asyncio.gather(ask(url), ask(url))
        await until(lambda: server.drivers["spec"].engine.num_running == 2)
        await both
        await ask(url)
        after = await switch(url)
        async with httpx.AsyncClient(base_url=url) as client:
            page = (await client.get("/metrics")).text
            internal = (await client.get("/server_info")).json()["internal_states"][0]
    assert after["state"] == "active"
    assert 0 < after["off_share"] < 1
    assert after["switches_total"] >= 2
    assert 1 < after["accept_length_on"] < 4
    assert after["t_on_ms"] > after["t_off_ms"] > 0
    assert internal["spec_switch"] == after
    assert re.search(r"^sglang:spec_switch_threshold\{.*\} 1.0$", page, re.MULTILINE)
    assert re.search(r'^sglang:spec_switch_steps_total\{.*mode="off"\} [1-9]', page, re.MULTILINE)


@pytest.mark.parametrize("layout", Layout)
async def test_only_a_shared_layout_lets_engines_slow_each_other(layout: Layout) -> None:
    async with SimServer(PAIR, SimOptions(layout=layout)) as server:
        spec, base = (server.drivers[name].engine for name in ("spec", "base"))
        assert (spec.gpu is base.gpu) is (layout is Layout.SHARED)


async def test_a_seed_decides_the_accept_lengths() -> None:
    counts = []
    for seed in (1, 1, 2):
        async with SimServer(PAIR, SimOptions(clock=CLOCK, seed=seed)) as server:
            await ask(server.urls["spec"])
            counts.append(server.drivers["spec"].engine.totals.decode_steps)
    assert counts[0] == counts[1] != counts[2]


async def test_engines_say_the_same_to_the_same_prompt() -> None:
    async with SimServer(PAIR, SimOptions(clock=CLOCK)) as server:
        texts = {(await ask(url)).json()["choices"][0]["text"] for url in server.urls.values()}
    assert len(texts) == 1


async def test_a_late_look_at_its_connections_leaves_a_gone_client_running() -> None:
    options = SimOptions(disconnect_s=3600)
    async with SimServer(PAIR, options) as server:
        engine = server.drivers["base"].engine
        async with httpx.AsyncClient(base_url=server.urls["base"]) as client:
            body = {**BODY, "max_tokens": 8_000, "stream": True, "rid": "gone"}
            async with client.stream("POST", "/v1/completions", json=body) as response:
                await anext(response.aiter_raw())
            await until(lambda: len(server.connections) == 1)
            assert engine.num_running == 1
            await client.post("/abort_request", json={"rid": "gone"})
            await until(lambda: not engine.has_work)


async def test_requests_sent_ahead_are_answered_in_order() -> None:
    async with SimServer(PAIR, SimOptions(clock=CLOCK)) as server:
        host, port = server.urls["base"].removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = b'{"prompt": "x", "max_tokens": 20}'
        post = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        post += b"content-length: %d\r\n\r\n%b" % (len(body), body)
        last = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        writer.write(post * 3 + last)
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        await writer.wait_closed()
    statuses = re.findall(rb"HTTP/1.1 (\d+)", answer)
    assert statuses == [b"200"] * 4
    assert answer.count(b"text_completion") == 3
    assert answer.rstrip().endswith(b"connection: close")


async def test_what_is_no_http_gets_a_400_and_the_door() -> None:
    async with SimServer(PAIR) as server:
        host, port = server.urls["base"].removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"\x00\x01\x02\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        await writer.wait_closed()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"Invalid HTTP request received." in answer


async def test_closing_the_server_frees_its_port_and_its_clients() -> None:
    async with SimServer(PAIR) as server:
        url = server.urls["base"]
        request = asyncio.create_task(ask(url, max_tokens=8_000))
        await until(lambda: server.drivers["base"].engine.num_running == 1)
    with pytest.raises(httpx.TransportError):
        await request
    with pytest.raises(httpx.ConnectError):
        await ask(url)


@pytest.mark.parametrize(
    ("engines", "message"),
    [
        (["spec"], "NAME=MODEL:PORT"),
        (["spec=h200-plain:x"], "NAME=MODEL:PORT"),
        (["spec=h200-plain:70000"], "NAME=MODEL:PORT"),
        (["spec=h300:0"], "no engine model h300; there are h200-plain, h200-tree-v1"),
        (["spec=h200-tree-v1@:0"], "NAME=MODEL:PORT"),
        (["spec=h200-tree-v1@x:0"], "NAME=MODEL:PORT"),
        (["spec=h200-plain@8:0"], "not known with the plugin; there are h200-tree-v1, "),
        (["a=h200-plain:0", "a=h200-plain:0"], "same name"),
    ],
)
def test_a_bad_engine_is_told_in_one_line(
    engines: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(engines) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1


def test_a_port_in_use_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main([f"base=h200-plain:{port}"]) == 2
    told = capsys.readouterr().err
    assert "cannot listen" in told
    assert str(port) in told
    assert told.count("\n") == 1


@pytest.mark.parametrize("value", ["0", "-1", "x", "nan", "inf"])
def test_a_clock_that_does_not_run_forward_is_refused(value: str) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["base=h200-plain:0", f"--clock={value}"])
    assert refused.value.code == 2


def test_sigterm_ends_it_at_once_with_streams_open() -> None:
    command = [sys.executable, "-m", "loadtest", "engine", "base=h200-plain:0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert line.startswith("base: h200-plain on http://127.0.0.1:")
        url = line.split()[-1]
        body = {**BODY, "max_tokens": 8_000, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
            next(response.iter_raw())
            server.send_signal(signal.SIGTERM)
            # The stream alone would have taken forty seconds.
            assert server.wait(timeout=20) == 0
