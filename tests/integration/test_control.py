"""The real command as a process, in front of simulated engines on real sockets."""

import asyncio
import json
import sys
from pathlib import Path

import httpx
import pytest

from loadtest.children import free_port
from tests.integration.processes import CHAT, DEADLINE_S, chat, client_of, engine, ready, router

pytestmark = pytest.mark.anyio


async def test_it_starts_with_both_servers_down_and_admits_each_as_it_comes_up() -> None:
    spec, base = free_port(), free_port()
    urls = ("--spec-url", f"http://127.0.0.1:{spec}", "--base-url", f"http://127.0.0.1:{base}")
    arguments = (*urls, "--policy", "threshold")
    async with router(*arguments) as made, client_of(made) as client:
        assert (await client.get("/healthz")).status_code == 200
        assert (await client.head("/healthz")).status_code == 200
        not_ready = await client.get("/readyz")
        assert not_ready.status_code == 503
        assert not_ready.json()["reason"] == "no server is up"
        assert set(not_ready.json()["servers"]) == {"spec", "base"}
        refused = await chat(client)
        assert refused.status_code == 503
        assert "error" in refused.json()

        async with engine("base", base):
            await ready(client, "base")
            assert (await client.get("/readyz")).status_code == 200
            alone = await chat(client)
            assert alone.status_code == 200
            assert alone.headers["x-crossover-server"] == "base"
            assert alone.headers["x-crossover-reason"] == "only_server"

            async with engine("spec", spec):
                await ready(client, "spec", "base")
                both = await chat(client)
                assert both.headers["x-crossover-server"] == "spec"
                assert both.headers["x-crossover-reason"] == "below_threshold"

            fallen = await chat(client)
            assert fallen.status_code == 200
            assert fallen.headers["x-crossover-server"] == "base"
            await ready(client, "base")
        assert await made.terminate() == 0
    assert made.errors == []


async def test_what_it_did_is_in_log_metrics_state_and_decisions(tmp_path: Path) -> None:
    spec, base = free_port(), free_port()
    key = tmp_path / "key"
    key.write_text("hunter2")
    urls = (
        "--admin-key-file",
        str(key),
        "--spec-url",
        f"http://127.0.0.1:{spec}",
        "--base-url",
        f"http://127.0.0.1:{base}",
        "--policy",
        "threshold",
    )
    async with engine("spec", spec), engine("base", base), router(*urls) as made:
        async with client_of(made) as client:
            await ready(client, "spec", "base")
            answer = await client.post(
                "/v1/chat/completions", json=CHAT, headers={"x-request-id": "mine-1"}
            )
            assert answer.status_code == 200
            streamed = await chat(client, stream=True)
            assert streamed.text.endswith("data: [DONE]\n\n")
            assert (await client.get("/no/such/path")).status_code == 404

            decisions = (await client.get("/crossover/decisions")).json()["decisions"]
            assert [each["reason"] for each in decisions] == ["below_threshold"] * 2
            assert decisions[0]["age_s"] <= decisions[1]["age_s"]
            assert decisions[0]["loads"]["spec"]["sequences"] == 0

            metrics = (await client.get("/metrics")).text
            done = 'router_requests_total{endpoint="/v1/chat/completions",outcome="ok",role="spec"'
            assert f'{done},server="spec",streaming="false"}} 1.0' in metrics
            assert 'router_ttft_seconds_count{role="spec",server="spec"} 1.0' in metrics
            assert 'router_server_up{role="base",server="base"} 1.0' in metrics
            assert "127.0.0.1" not in metrics

            state = (await client.get("/crossover/state")).json()
            assert state["policy"]["name"] == "threshold"
            assert [server["context_length"] for server in state["servers"]] == [8192, 8192]
            assert [server["breaker"] for server in state["servers"]] == ["closed", "closed"]
            assert state["queue"] == {"interactive": 0, "batch": 0}
            assert "hunter2" not in json.dumps(state) + metrics
            assert any("max_running_requests" in warning for warning in state["parity_warnings"])
        assert await made.terminate() == 0
    assert not [line for line in made.lines if "hunter2" in line]
    (line,) = made.logged(request_id="mine-1")
    assert (line["server"], line["reason"], line["outcome"]) == ("spec", "below_threshold", "ok")
    assert len(made.logged(message="request")) == 3
    assert made.logged(level="warning", logger="crossover")  # the threshold was not measured
    assert [each for each in made.lines if "max_running_requests differs" in each]


async def test_a_request_id_cannot_forge_a_log_line() -> None:
    port = free_port()
    arguments = ("--base-url", f"http://127.0.0.1:{port}", "--policy", "base-only")
    async with router(*arguments, "--log-format", "text") as made:
        host, at = made.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(at))
        writer.write(
            b"GET /nope HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            b"x-request-id: a\x0bforged\x1b[2J\xc2\x85\xe2\x80\xa8line\r\n\r\n"
        )
        assert await reader.read()
        writer.close()
        await made.terminate()
    assert all(line.isprintable() for line in made.lines)
    assert not [line for line in made.lines if line.startswith(("forged", "line"))]


async def test_sigterm_ends_it_with_0_though_a_stream_is_under_way() -> None:
    port = free_port()
    arguments = ("--base-url", f"http://127.0.0.1:{port}", "--policy", "base-only")
    arguments = (*arguments, "--drain-timeout-s", "0")
    async with engine("base", port), router(*arguments) as made, client_of(made) as client:
        await ready(client, "base")
        body = {**CHAT, "stream": True, "max_tokens": 4000}
        async with client.stream("POST", "/v1/chat/completions", json=body) as stream:
            chunks = stream.aiter_raw()
            await anext(chunks)
            assert await made.terminate() == 0
            with pytest.raises(httpx.RemoteProtocolError):
                async for _ in chunks:
                    pass
    assert made.errors == []
    assert not any("traceback" in line for line in made.lines)


async def test_a_second_router_on_the_same_port_says_so_and_exits_with_2(tmp_path: Path) -> None:
    config = tmp_path / "crossover.yaml"
    config.write_text("base_url: http://127.0.0.1:1\npolicy: base-only\n")
    async with router("--config", str(config)) as first:
        port = first.url.rpartition(":")[2]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "router", "serve", "--config", str(config), "--port", port,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        async with asyncio.timeout(DEADLINE_S):
            out, error = await process.communicate()
    assert process.returncode == 2
    assert out == b""
    assert error.decode().startswith(f"crossover: cannot listen on 127.0.0.1:{port}: Address")
    assert len(error.splitlines()) == 1
