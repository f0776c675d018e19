"""Paths that change an engine, and paths that tell too much."""

import json

import pytest

from tests.integration.rig import ADMIN_KEY, Call, Engine, running

pytestmark = pytest.mark.anyio

KEY = {"authorization": f"Bearer {ADMIN_KEY}"}


@pytest.mark.parametrize(
    "path",
    [
        "/flush_cache", "/abort_request", "/update_weights_from_disk", "//flush_cache",
        "/FLUSH_CACHE", "/flush_cache/", "/flush%5fcache", "/%66lush_cache", "/v1/../flush_cache",
        "/v1/models/..%2f..%2fflush_cache", "/v1/models/%2e%2e/%2e%2e/flush_cache",
        "/%2566lush_cache", "/flush_cache;x", "/a/%2e%2e/flush_cache", "/\\flush_cache",
    ],
)  # fmt: skip
@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}])
async def test_no_spelling_of_a_control_path_gets_through(
    path: str, headers: dict[str, str]
) -> None:
    async with running() as rig:
        lines = [f"{name}: {value}" for name, value in headers.items()]
        reader, writer = await rig.post(path, b"{}", *lines)
        assert (await reader.readline()).split()[1] in (b"403", b"404")
        assert rig.spec.calls == rig.base.calls == rig.spec.aborts == rig.base.aborts == []
        record = await rig.record()
        assert (record.outcome, record.attempts) == ("rejected", 0)
        assert record.endpoint in ("control", "other")
        writer.close()


async def test_the_admin_key_opens_control_paths_of_a_named_server() -> None:
    async with running() as rig:
        headers = {**KEY, "x-crossover-target": "base"}
        response = await rig.http.post("/flush_cache?timeout=1", headers=headers)
        assert response.json() == {"ok": True}
        assert [call.target for call in rig.base.calls] == ["/flush_cache?timeout=1"]
        assert rig.base.calls[0].header("x-crossover-target") is None
        assert rig.spec.calls == []
        record = await rig.record()
        assert (record.endpoint, record.outcome) == ("control", "ok")
        await rig.settled()


@pytest.mark.parametrize("target", [{}, {"x-crossover-target": "nobody"}])
async def test_which_server_to_control_is_never_guessed(target: dict[str, str]) -> None:
    async with running() as rig:
        response = await rig.http.post("/flush_cache", headers={**KEY, **target})
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "target_needed"
        assert rig.spec.calls == rig.base.calls == []


async def test_a_lone_server_needs_no_name() -> None:
    async with running(engines={"spec": Engine()}) as rig:
        assert (await rig.http.post("/flush_cache", headers=KEY)).status_code == 200
        assert len(rig.spec.calls) == 1


async def test_even_the_admin_key_opens_no_disguise() -> None:
    async with running() as rig:
        headers = {**KEY, "x-crossover-target": "spec"}
        assert (await rig.http.post("/flush_cache/", headers=headers)).status_code == 403
        assert rig.spec.calls == []


async def test_without_an_admin_key_control_paths_stay_shut() -> None:
    async with running(admin_key=None) as rig:
        for headers in ({}, {"authorization": "Bearer"}, {"authorization": "Bearer None"}):
            response = await rig.http.post("/flush_cache", headers=headers)
            assert response.status_code == 403
            assert response.headers["x-crossover-error"] == "control_path_refused"
        assert rig.spec.calls == []


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
async def test_server_info_is_shown_without_keys(path: str) -> None:
    info = {
        "api_key": "s1", "admin_api_key": "s2", "ssl_keyfile_password": "s3", "tp_size": 2,
        "model_path": "llama", "max_total_num_tokens": 5,
        "hicache_storage_backend_extra_config": "s4",
        "internal_states": [{"hf_token": "s5", "nested": {"API_KEY": "s6"}}], "version": "0.5.12",
    }  # fmt: skip

    async def script(call: Call) -> None:
        await call.reply(json.dumps(info).encode())

    async with running() as rig:
        rig.spec.script = rig.base.script = script
        response = await rig.http.get(path)
        assert response.headers["x-crossover-server"] == "spec"
        shown = response.json()
        assert not any(f"s{number}" in response.text for number in range(1, 7))
        assert (shown["tp_size"], shown["max_total_num_tokens"]) == (2, 5)
        assert (shown["model_path"], shown["version"]) == ("llama", "0.5.12")
        named = await rig.http.get(path, headers={"x-crossover-target": "base"})
        assert named.headers["x-crossover-server"] == "base"
        assert (await rig.record(2)).outcome == "ok"


async def test_server_info_that_cannot_be_read_is_not_shown() -> None:
    async def script(call: Call) -> None:
        await call.reply(b'api_key="s1"')

    async with running() as rig:
        rig.spec.script = script
        response = await rig.http.get("/server_info")
        assert response.status_code == 502
        assert "s1" not in response.text


@pytest.mark.parametrize("path", ["/", "/nope", "/V1/models", "/v1/chat/completions/", "/docs"])
async def test_unknown_paths_are_not_relayed(path: str) -> None:
    async with running() as rig:
        response = await rig.http.get(path)
        assert response.status_code == 404
        assert response.json()["error"]["type"] == "invalid_request_error"
        assert response.headers["x-crossover-error"] == "unknown_path"
        assert "x-request-id" in response.headers
        assert rig.spec.calls == []
        assert (await rig.record()).endpoint == "other"


async def test_a_wrong_method_is_told_the_right_ones() -> None:
    async with running() as rig:
        response = await rig.http.get("/v1/chat/completions")
        assert (response.status_code, response.headers["allow"]) == (405, "POST")
        assert rig.spec.calls == []
