"""What can be seen of a server from outside, asked once: for `crossover doctor`.

Each question stands for itself: one that gets no answer leaves its field unknown, and the others go
on. Nothing here changes a server: the abort that tries the admin key is of a request that is none.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from time import monotonic
from urllib.parse import urlsplit

from router.core.parity import ServerFacts
from router.core.types import ServerSpec, SwitchReport
from router.dataplane.auth import Credentials
from router.dataplane.engine_api import EngineApi, EngineError, NoAnswerError
from router.dataplane.engine_loads import PATH as LOADS
from router.dataplane.engine_loads import read_loads
from router.dataplane.facts import read_facts
from router.dataplane.headers import encode_head, new_id
from router.settings import Access, Settings

ANSWER_TIMEOUT_S = 30.0
# An idle connection is watched for no longer than this.
IDLE_S_MAX = 10.0
_READ_BYTES = 65536
_METRIC = b"sglang:"


@dataclass(slots=True)
class Seen:
    """One server, as far as it let itself be seen. None: not known; texts are for the operator.

    `refused` is the status that its models were refused with. `idle_closed_s` is how long it kept
    an idle connection, None if it kept it for as long as it was watched, `idle_watched_s`.
    """

    server: ServerSpec
    error: str | None = None
    refused: int | None = None
    answer_s: float | None = None
    clock_ahead_s: float | None = None
    facts: ServerFacts | None = None
    remarks: tuple[str, ...] = ()
    max_queued: int | None = None
    has_metrics: bool | None = None
    admin_error: str | None = None
    switch: SwitchReport | None = None
    idle_watched_s: float | None = None
    idle_closed_s: float | None = None


async def look(settings: Settings) -> list[Seen]:
    """Look at all servers of the settings, side by side."""
    access = settings.security.access
    admin = {
        name: replace(each, api_key=each.admin_key or each.api_key) for name, each in access.items()
    }
    api, admin_api = EngineApi(ANSWER_TIMEOUT_S, access), EngineApi(ANSWER_TIMEOUT_S, admin)
    try:
        return await asyncio.gather(
            *(_look(server, settings, api, admin_api) for server in settings.servers)
        )
    finally:
        await api.aclose()
        await admin_api.aclose()


async def _look(server: ServerSpec, settings: Settings, api: EngineApi, admin: EngineApi) -> Seen:
    seen = Seen(server)
    try:
        await api.get(server, "/health")
    except EngineError as error:
        seen.error = str(error)
        return seen
    began = monotonic()
    try:
        await api.get(server, "/v1/models")
        seen.answer_s = monotonic() - began
    except NoAnswerError as error:
        seen.refused = error.status
    except EngineError as error:
        seen.error = str(error)
    if seen.answer_s is None:
        return seen
    await asyncio.gather(
        _ask_settings(seen, api),
        _ask_metrics(seen, api),
        _ask_switch(seen, api),
        _try_admin(seen, admin),
        _watch_idle(seen, settings.security.access, settings.keepalive_s),
    )
    return seen


async def _ask_settings(seen: Seen, api: EngineApi) -> None:
    told = await read_facts(seen.server, api)
    if told is not None:
        seen.facts, seen.remarks = told.facts, told.remarks
    try:
        queued = (await api.get_json(seen.server, "/server_info")).get("max_queued_requests")
    except EngineError:
        return
    if isinstance(queued, int) and not isinstance(queued, bool):
        seen.max_queued = queued


async def _ask_metrics(seen: Seen, api: EngineApi) -> None:
    try:
        seen.has_metrics = _METRIC in await api.get(seen.server, "/metrics")
    except NoAnswerError:
        seen.has_metrics = False
    except EngineError:
        pass


async def _ask_switch(seen: Seen, api: EngineApi) -> None:
    try:
        seen.switch = read_loads(await api.get_json(seen.server, LOADS), 0.0).report.switch
    except EngineError:
        pass


async def _try_admin(seen: Seen, admin: EngineApi) -> None:
    try:
        await admin.post(seen.server, "/abort_request", {"rid": f"crossover-doctor-{new_id()}"})
    except EngineError as error:
        seen.admin_error = str(error)


async def _watch_idle(seen: Seen, access: Mapping[str, Access], keepalive_s: float) -> None:
    """Hold a connection for as long as the router would use it again."""
    mine = access.get(seen.server.name, Access())
    parts = urlsplit(seen.server.url)
    https = parts.scheme == "https"
    port = parts.port or (443 if https else 80)
    tls = mine.tls.context() if https else None
    target = f"{parts.path}/v1/models".encode("ascii")
    headers = Credentials.of(mine).put_on([])
    head = encode_head("GET", target, parts.netloc.encode("ascii"), headers, 0)
    try:
        reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=tls)
    except OSError:
        return
    try:
        writer.write(head)
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            seen.clock_ahead_s = _clock_ahead(await reader.readuntil(b"\r\n\r\n"))
        began = monotonic()
        seen.idle_watched_s = min(keepalive_s, IDLE_S_MAX)
        async with asyncio.timeout(seen.idle_watched_s):
            while await reader.read(_READ_BYTES):
                pass
        seen.idle_closed_s = monotonic() - began
    except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        pass
    finally:
        writer.transport.abort()


def _clock_ahead(head: bytes) -> float | None:
    """Return how far ahead of ours the clock of an answer's head is, to about a second."""
    for line in head.decode("latin-1").split("\r\n"):
        name, _, value = line.partition(":")
        if name.lower() == "date":
            try:
                told = parsedate_to_datetime(value.strip())
            except ValueError:
                return None
            return (told.astimezone(UTC) - datetime.now(UTC)).total_seconds()
    return None
