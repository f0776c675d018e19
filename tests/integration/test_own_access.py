"""Who may ask for the own endpoints of the router, and that no key is ever told."""

import asyncio
import contextlib
import io
import logging
import socket
from base64 import b64encode
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import uvicorn

from router.cli import main
from router.core.types import Role, ServerSpec
from router.dataplane.app import create_app
from router.dataplane.control import PATHS
from router.dataplane.inlet import protocol
from router.dataplane.logs import configure
from router.settings import Access, ClientKey, Security, Settings
from tests.integration.rig import CHAT, PATIENCE_S, PLAIN, Call, Engine, until

pytestmark = pytest.mark.anyio

PAGE = "https://chat.example"
KEYS = {name: f"planted-{name}-key" for name in ("client", "admin", "engine", "boss")}
SECURITY = Security(
    client_keys=(ClientKey(KEYS["client"], "chat"),),
    admin_key=KEYS["admin"],
    access={"spec": Access(KEYS["engine"], KEYS["boss"])},
    cors_origins=(PAGE,),
)


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[name]}"}


def password(key: str) -> dict[str, str]:
    return {"authorization": "Basic " + b64encode(f"me:{key}".encode()).decode()}


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass
class House:
    """A running router, its one engine, and its log."""

    http: httpx.AsyncClient
    engine: Engine
    log: io.StringIO


@contextlib.asynccontextmanager
async def house(security: Security = SECURITY) -> AsyncIterator[House]:
    engine, log = Engine(), io.StringIO()
    await engine.start()
    settings = Settings(
        servers=(ServerSpec("spec", Role.SPEC, engine.url),), policy="spec-only", security=security
    )
    handler = configure("json", "debug", log)
    app = create_app(settings)
    config = uvicorn.Config(
        app, http=protocol(app.relay, PATHS), lifespan="on", interface="asgi3", log_config=None,
        access_log=False, ws="none", timeout_graceful_shutdown=1,
    )  # fmt: skip
    try:
        with socket.create_server(("127.0.0.1", 0)) as sock:
            server = _Server(config)
            task = asyncio.get_running_loop().create_task(server.serve([sock]))
            await until(lambda: server.started or task.done())
            url = f"http://127.0.0.1:{sock.getsockname()[1]}"
            try:
                async with httpx.AsyncClient(
                    base_url=url, timeout=PATIENCE_S, trust_env=False
                ) as http:
                    await ready(http)
                    yield House(http, engine, log)
            finally:
                server.should_exit = True
                await task
    finally:
        await engine.stop()
        logging.getLogger().removeHandler(handler)
        handler.close()


async def ready(http: httpx.AsyncClient) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while (await http.get("/readyz")).status_code != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_whether_it_lives_is_told_to_all_and_the_rest_to_clients() -> None:
    async with house() as it:
        for path in sorted(PATHS):
            if path in ("/crossover/drain", "/crossover/policy", "/crossover/key"):
                continue  # those are written to
            without = await it.http.get(path)
            if path in ("/healthz", "/readyz"):
                assert without.status_code == 200
                continue
            assert without.status_code == 401, path
            assert without.json()["error"]["code"] == "invalid_api_key"
            offered = without.headers.get_list("www-authenticate")
            assert offered == ["Bearer", 'Basic realm="crossover"']
            for headers in (
                bearer("client"), bearer("admin"), {"x-api-key": KEYS["client"]},
                password(KEYS["client"]), password(KEYS["admin"]),
            ):  # fmt: skip
                told = await it.http.get(path, headers=headers)
                assert told.status_code in (200, 308), path
            wrong = await it.http.get(path, headers=password("wrong"))
            assert wrong.status_code == 401


async def test_without_client_keys_all_is_told_and_still_nothing_changed() -> None:
    async with house(Security(admin_key=KEYS["admin"])) as it:
        assert (await it.http.get("/metrics")).status_code == 200
        refused = await it.http.post("/crossover/state", content=b"{}")
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "admin_key_needed"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401), (bearer("client"), 403), (password(KEYS["admin"]), 401),
        (password(KEYS["client"]), 401), (bearer("admin"), 405),
    ],
)  # fmt: skip
async def test_what_changes_something_takes_the_admin_key_and_no_password(
    headers: dict[str, str], status: int
) -> None:
    """A browser adds a password by itself, to what another page makes it send, too."""
    async with house() as it:
        response = await it.http.post("/crossover/state", content=b"{}", headers=headers)
        assert response.status_code == status
        # So that no browser asks for a password that would not help.
        assert "Basic" not in response.headers.get("www-authenticate", "")


@pytest.mark.parametrize(("name", "status"), [("admin", 200), ("client", 403), ("engine", 401)])
async def test_whether_a_key_is_the_admins_can_be_asked(name: str, status: int) -> None:
    async with house() as it:
        response = await it.http.post("/crossover/key", headers=bearer(name))
        assert response.status_code == status
        assert (response.json() == {"admin": True}) is (status == 200)


@pytest.mark.parametrize("chunked", [True, False])
async def test_a_body_for_an_own_endpoint_is_bounded(chunked: bool) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(70):
            yield b"x" * 1024

    async with house() as it:
        content = chunks() if chunked else b"x" * 70 * 1024
        response = await it.http.post("/crossover/state", content=content, headers=bearer("admin"))
        assert response.status_code == 413
        assert response.headers["x-crossover-error"] == "body_too_large"


async def test_a_named_page_may_read_own_endpoints() -> None:
    async with house() as it:
        asked = {"origin": PAGE, "access-control-request-method": "GET"}
        allowed = await it.http.options("/crossover/state", headers=asked)
        assert allowed.status_code == 200
        told = await it.http.get("/crossover/state", headers={"origin": PAGE, **bearer("client")})
        for response in (allowed, told):
            assert response.headers["access-control-allow-origin"] == PAGE
        other = await it.http.get(
            "/crossover/state", headers={"origin": "https://evil.example", **bearer("client")}
        )
        assert "access-control-allow-origin" not in other.headers


async def test_probes_and_load_polls_carry_the_servers_key_and_nobody_elses() -> None:
    async with house() as it:
        await until(lambda: any(call.target == "/v1/loads" for call in it.engine.calls))
        assert {call.header("authorization") for call in it.engine.calls} == {
            f"Bearer {KEYS['engine']}"
        }


async def test_crossover_status_brings_a_key_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "key"
    async with house() as it:
        status = ["status", "--json", "--url", str(it.http.base_url)]
        assert await asyncio.to_thread(main, status) == 1
        assert "name a file with one by --key-file" in capsys.readouterr().err
        key.write_text(KEYS["client"])
        assert await asyncio.to_thread(main, [*status, "--key-file", str(key)]) == 0
        assert "spec" in capsys.readouterr().out
    key.write_text("not a key")
    assert main([*status, "--key-file", str(key)]) == 2
    assert "flag --key-file" in capsys.readouterr().err


async def test_no_key_is_in_any_answer_log_line_or_metric() -> None:
    async def broken(call: Call) -> None:
        """Say everything that was said, as a careless engine would."""
        if call.target in ("/health", "/v1/loads"):
            await call.reply(b"{}")
        else:
            await call.head(200, "content-type: application/json", "content-length: 1000")
            call.reset()

    async with house() as it:
        it.engine.script = broken
        shown: list[str] = []
        for name in ("client", "admin", "engine", "boss"):
            for method, path in (
                ("POST", CHAT), ("GET", "/v1/models"), ("GET", "/server_info"),
                ("POST", "/flush_cache"), ("GET", "/nowhere"), ("POST", "/crossover/state"),
                *(("GET", path) for path in sorted(PATHS)),
            ):  # fmt: skip
                content = PLAIN if method == "POST" else None
                for headers in (bearer(name), {"x-api-key": KEYS[name]}, password(KEYS[name])):
                    try:
                        response = await it.http.request(
                            method, path, content=content, headers=headers
                        )
                    except httpx.RemoteProtocolError as error:
                        shown.append(str(error))
                    else:
                        shown.append(f"{response.headers} {response.text}")
        assert len(shown) > 100
    told = "\n".join([*shown, it.log.getvalue()])
    assert "router_requests_total" in told
    assert '"endpoint":"/v1/chat/completions"' in told
    assert "planted" not in told
    assert not any(b64encode(f"me:{key}".encode()).decode() in told for key in KEYS.values())
