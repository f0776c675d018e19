"""Who gets through the relay, with what, and what nobody gets: keys, browsers, WebSockets."""

import asyncio
import json

import pytest
from openai import AsyncOpenAI, AuthenticationError

from router.settings import Access, ClientKey
from tests.integration.rig import ADMIN_KEY, CHAT, PLAIN, Call, event, request, running, until

pytestmark = pytest.mark.anyio

CLIENTS = (ClientKey("sk-one"), ClientKey("sk-two", "chat"))
SERVERS = {"spec": Access("engine-key", "engine-boss"), "base": Access("base-key")}
PAGE = "https://chat.example"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    "headers", [bearer("sk-one"), bearer("sk-two"), {"x-api-key": "sk-two"}, bearer(ADMIN_KEY)]
)
async def test_a_client_key_lets_in_and_stays_here(headers: dict[str, str]) -> None:
    async with running(client_keys=CLIENTS, access=SERVERS) as rig:
        response = await rig.http.post(CHAT, content=PLAIN, headers=headers)
        assert response.status_code == 200
        (call,) = rig.spec.calls
        assert [value for name, value in call.headers if name == "authorization"] == [
            "Bearer engine-key"
        ]
        assert call.header("x-api-key") is None


async def test_where_the_server_has_no_key_none_is_sent() -> None:
    async with running(client_keys=CLIENTS) as rig:
        assert (
            await rig.http.post(CHAT, content=PLAIN, headers=bearer("sk-one"))
        ).status_code == 200
        assert rig.spec.calls[0].header("authorization") is None


@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/server_info", "/flush_cache", "/nowhere"])
@pytest.mark.parametrize("headers", [{}, bearer("sk-wrong"), {"x-api-key": "sk-wrong"}])
async def test_without_a_good_key_nothing_is_told(path: str, headers: dict[str, str]) -> None:
    async with running(client_keys=CLIENTS) as rig:
        response = await rig.http.request(
            "GET" if "models" in path else "POST", path, headers=headers
        )
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["x-crossover-error"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
        assert "sk-" not in response.text
        assert rig.spec.calls == rig.base.calls == []
        record = await rig.record()
        assert (record.status, record.outcome, record.attempts) == (401, "rejected", 0)


async def test_openais_client_sees_an_authentication_error() -> None:
    async with (
        running(client_keys=CLIENTS) as rig,
        AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="sk-wrong") as client,
    ):
        with pytest.raises(AuthenticationError, match="Incorrect API key"):
            await client.models.list()


async def test_a_body_without_a_key_is_refused_before_it_is_sent() -> None:
    async with running(client_keys=CLIENTS, body_bytes=1 << 30) as rig:
        reader, writer = await rig.raw(
            b"POST /generate HTTP/1.1\r\nhost: r\r\ncontent-length: 1000000000\r\n\r\n{"
        )
        assert b" 401 " in await reader.readline()
        assert b"connection: close" in await reader.readuntil(b"\r\n\r\n")
        writer.close()
        await rig.settled()


async def test_a_request_that_is_refused_without_a_body_keeps_its_connection() -> None:
    async with running(client_keys=CLIENTS) as rig:
        good = request("GET", "/v1/models", b"", "authorization: Bearer sk-one")
        reader, writer = await rig.raw(request("GET", "/v1/models") + good)
        for status in (b" 401 ", b" 200 "):
            head = await reader.readuntil(b"\r\n\r\n")
            assert status in head
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
        writer.close()


async def test_control_paths_take_the_admin_key_and_send_the_servers_own() -> None:
    async with running(client_keys=CLIENTS, access=SERVERS) as rig:
        for key, status in (("sk-one", 403), (ADMIN_KEY, 200)):
            for name in ("spec", "base"):
                headers = {**bearer(key), "x-crossover-target": name}
                response = await rig.http.post("/flush_cache", headers=headers)
                assert response.status_code == status
        assert [call.header("authorization") for call in rig.spec.calls] == ["Bearer engine-boss"]
        assert [call.header("authorization") for call in rig.base.calls] == ["Bearer base-key"]


async def test_the_admin_key_never_travels_on_to_an_engine() -> None:
    async with running() as rig:
        headers = {**bearer(ADMIN_KEY), "x-crossover-target": "spec"}
        for path in ("/flush_cache", CHAT, "/server_info"):
            method = "GET" if "info" in path else "POST"
            assert (await rig.http.request(method, path, headers=headers)).status_code == 200
        assert len(rig.spec.calls) == 3
        assert not any(call.header("authorization") for call in rig.spec.calls)


async def test_without_client_keys_a_clients_own_key_goes_through() -> None:
    async with running() as rig:
        headers = {**bearer("sk-theirs"), "x-api-key": "mine"}
        assert (await rig.http.post(CHAT, content=PLAIN, headers=headers)).status_code == 200
        (call,) = rig.spec.calls
        assert call.header("authorization") == "Bearer sk-theirs"
        assert call.header("x-api-key") == "mine"


async def test_server_info_and_aborts_carry_the_servers_keys() -> None:
    left = asyncio.Event()

    async def hold(call: Call) -> None:
        await call.stream_head()
        await call.chunk(event("a"))
        left.set()
        await call.gone()

    async with running(client_keys=CLIENTS, access=SERVERS) as rig:
        await rig.http.get("/server_info", headers=bearer("sk-one"))
        assert rig.spec.calls[0].header("authorization") == "Bearer engine-key"
        rig.spec.script = hold
        line = "authorization: Bearer sk-one"
        body = json.dumps({"messages": [], "stream": True}).encode()
        _, writer = await rig.post(CHAT, body, line)
        await left.wait()
        writer.close()
        await until(lambda: rig.spec.aborts)
        assert rig.spec.aborts[0].header("authorization") == "Bearer engine-boss"
        await rig.settled()


async def test_a_named_page_may_read_what_is_relayed() -> None:
    async def script(call: Call) -> None:
        lines = ("access-control-allow-origin: *", "access-control-allow-credentials: true")
        await call.reply(b"{}", 200, *lines)

    async with running(cors_origins=(PAGE,), client_keys=CLIENTS) as rig:
        rig.spec.script = script
        for origin, allowed in ((PAGE, PAGE), ("https://evil.example", None)):
            headers = {"origin": origin, **bearer("sk-one")}
            response = await rig.http.post(CHAT, content=PLAIN, headers=headers)
            assert response.status_code == 200
            assert response.headers.get("access-control-allow-origin") == allowed
            assert "access-control-allow-credentials" not in response.headers
            assert response.headers["vary"] == "origin"
        # An error, too, can be read by the page.
        refused = await rig.http.post(CHAT, content=PLAIN, headers={"origin": PAGE})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == PAGE


async def test_a_preflight_is_answered_here_and_needs_no_key() -> None:
    async with running(cors_origins=(PAGE,), client_keys=CLIENTS) as rig:
        headers = {
            "origin": PAGE,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        }
        response = await rig.http.options(CHAT, headers=headers)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == PAGE
        assert response.headers["access-control-allow-headers"] == "authorization,content-type"
        refused = await rig.http.options(
            CHAT, headers={**headers, "origin": "https://evil.example"}
        )
        assert refused.status_code == 403
        assert "access-control-allow-origin" not in refused.headers
        assert rig.spec.calls == []


async def test_without_origins_an_engines_own_permission_does_not_pass() -> None:
    async def script(call: Call) -> None:
        await call.reply(b"{}", 200, "access-control-allow-origin: *")

    async with running() as rig:
        rig.spec.script = script
        response = await rig.http.post(CHAT, content=PLAIN, headers={"origin": PAGE})
        assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize("path", [CHAT, "/v1/realtime", "/own"])
async def test_a_websocket_is_refused_in_words(path: str) -> None:
    async with running() as rig:
        lines = (
            "connection: Upgrade", "upgrade: WebSocket", "sec-websocket-version: 13",
            "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==",
        )  # fmt: skip
        reader, writer = await rig.raw(request("GET", path, b"", *lines))
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert head.startswith(b"http/1.1 501 ")
        assert b"x-crossover-error: websocket_not_supported" in head
        length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
        error = json.loads(await reader.readexactly(length))["error"]
        assert "server-sent events" in error["message"]
        # The connection goes on as HTTP.
        writer.write(request("GET", "/v1/models"))
        assert b" 200 " in await reader.readline()
        assert len(rig.spec.calls) == 1
        writer.close()


async def test_an_offer_of_http2_is_passed_over() -> None:
    async with running() as rig:
        lines = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAM")
        reader, writer = await rig.post(CHAT, PLAIN, *lines)
        assert b" 200 " in await reader.readline()
        assert rig.spec.calls[0].body.startswith(b"{")
        writer.close()


@pytest.mark.parametrize("size", [99, 100, 101])
async def test_a_chunked_body_has_the_same_limit(size: int) -> None:
    async def chunks() -> object:
        for _ in range(size):
            yield b" "

    async with running(body_bytes=100) as rig:
        response = await rig.http.post("/v1/tokenize", content=chunks())  # type: ignore[arg-type]
        assert response.status_code == (413 if size > 100 else 200)
        assert len(rig.spec.calls) == (size <= 100)
        if size > 100:
            assert response.headers["x-crossover-error"] == "body_too_large"


async def test_keys_in_a_url_are_no_keys() -> None:
    async with running(client_keys=CLIENTS) as rig:
        response = await rig.http.get("/v1/models?api_key=sk-one&key=sk-one")
        assert response.status_code == 401
