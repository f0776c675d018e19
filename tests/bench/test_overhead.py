"""The bench's own honesty: what it counts, what it drops, and that it notices a wrong reply."""

import asyncio
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bench.overhead import OURS, RIVAL, TESTS, compare
from tests.bench.rig import Harness, build_harness

PLAIN = next(test for test in TESTS if test.name == "ns64")
needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="the harness is C")


def row(peer: str, number: int, cpu_ms: float, requests: int) -> dict:
    return {
        "test": PLAIN.name,
        "peer": peer,
        "round": number,
        "cpu_ms": cpu_ms,
        "requests": requests,
        "chunks": 0,
        **dict.fromkeys(("first_us", "chunk_us", "reply_us")),
    }


def test_the_ratio_pairs_rounds() -> None:
    rows = [row(OURS, 0, 400, 1000), row(RIVAL, 0, 800, 1000)]
    rows += [row(OURS, 1, 900, 1000), row(RIVAL, 1, 1800, 1000)]
    found = compare(rows, PLAIN)
    assert found["rounds"] == 2
    assert found["ratio"] == {"median": 0.5, "low": 0.5, "high": 0.5}


def test_a_round_with_too_little_cpu_is_dropped() -> None:
    rows = [row(OURS, 0, 400, 1000), row(RIVAL, 0, 800, 1000)]
    rows += [row(OURS, 1, 150, 1000), row(RIVAL, 1, 800, 1000)]
    assert compare(rows, PLAIN)["rounds"] == 1


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    running = Harness(build_harness(tmp_path), core=None)
    yield running
    running.stop()


def port_of(url: str) -> int:
    return int(url.rsplit(":", 1)[1])


@needs_compiler
@pytest.mark.parametrize(
    ("settings", "counted"),
    [
        ({"mode": "plain", "conns": 4}, "requests"),
        ({"mode": "stream", "conns": 4, "tokens": 3, "ttft_ms": 1, "itl_ms": 1}, "requests"),
        ({"mode": "lock", "conns": 4, "tokens": 1_000_000_000}, "chunks"),
    ],
)
def test_stubs_and_client_agree_without_a_router(
    harness: Harness, settings: dict, counted: str
) -> None:
    done = harness.run(port_of(harness.servers[0]), [], {**settings, "seconds": 0.2, "warm": 0.05})
    assert done[counted] > 0
    assert done["errors"] == 0


@needs_compiler
@pytest.mark.parametrize("wrong", [(b"/1/", b"/2/"), (b"[DONE]", b"[NONE]")])
def test_a_wrong_chunk_is_an_error(harness: Harness, wrong: tuple[bytes, bytes]) -> None:
    with CorruptingRelay(port_of(harness.servers[0]), wrong) as port:
        settings = {"mode": "stream", "conns": 2, "tokens": 3, "ttft_ms": 1, "itl_ms": 1}
        done = harness.run(port, [], {**settings, "seconds": 0.3, "warm": 0.05})
    assert done["errors"] > 0


class CorruptingRelay:
    """A TCP relay that replaces some bytes of what the server sends."""

    def __init__(self, upstream: int, wrong: tuple[bytes, bytes]) -> None:
        self._upstream, self._wrong = upstream, wrong
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> int:
        self._thread.start()
        start = asyncio.run_coroutine_threadsafe(self._start(), self._loop)
        return start.result(10)

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> int:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        return self._server.sockets[0].getsockname()[1]

    async def _end(self) -> None:
        self._server.close()
        mine = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not mine]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._upstream)

        async def pump(
            source: asyncio.StreamReader, sink: asyncio.StreamWriter, wrong: tuple[bytes, bytes]
        ) -> None:
            try:
                while data := await source.read(65536):
                    sink.write(data.replace(*wrong))
            except ConnectionError:
                pass
            finally:
                sink.close()

        await asyncio.gather(
            pump(reader, up_writer, (b"@", b"@")), pump(up_reader, writer, self._wrong)
        )
