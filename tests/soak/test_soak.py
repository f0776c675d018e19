"""The soak itself: that it runs, and that it would see what it is for."""

import asyncio
import json
from pathlib import Path

import pytest

from tests.integration.rig import DONE, Call, event
from tests.soak.soak import main, soaking
from tests.soak.traffic import STREAM, judged
from tests.soak.watched import Sample, slope

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
COUNT = 1000
EACH_KB_MAX = 64
END = b"0\r\n\r\n"


@pytest.mark.slow
def test_a_short_soak_leaves_nothing_behind_and_writes_what_it_saw(tmp_path: Path) -> None:
    results = tmp_path / "soak.json"
    argv = ["--minutes", "0.03", "--disconnects", "200", "--json", str(results)]
    assert main(argv) == 0
    seen = json.loads(results.read_text())
    assert seen["provenance"]["seed"]
    for phase in seen["phases"].values():
        assert (phase["leases"], phase["failed"]) == (0, [])
    assert seen["phases"]["disconnects"]["ended"] == {"left": 200}
    assert seen["phases"]["mixed"]["ended"]["200"] > 0


def test_a_soak_that_cannot_write_its_results_says_so_before_it_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["--json", str(tmp_path / "file" / "x.json")]) == 2
    assert "cannot write" in capsys.readouterr().err


@pytest.mark.anyio
@pytest.mark.slow
async def test_a_thousand_streams_at_once_take_little_memory_each(tmp_path: Path) -> None:
    async def one_event(call: Call) -> None:
        if call.method == "GET":
            await call.reply(b"{}")
            return
        await call.stream_head()
        await call.chunk(event("a"))
        await call.gone()

    async def opened() -> asyncio.StreamWriter:
        reader, writer = await asyncio.open_connection("127.0.0.1", soak.port)
        writer.write(STREAM)
        await reader.readuntil(b'"a"')
        return writer

    async with soaking(tmp_path, seed=1) as soak:
        for engine in soak.engines.values():
            engine.script = one_event
        before = soak.watched.sample(0.0)
        clients = [await opened() for _ in range(COUNT)]
        during = soak.watched.sample(1.0)
        assert await soak.watched.leases() == COUNT
        each_kb = (during.rss_bytes - before.rss_bytes) / COUNT / 1024
        print(f"{each_kb:.1f} KB a stream")
        assert each_kb < EACH_KB_MAX
        for writer in clients:
            writer.close()
        leases, _ = await soak.watched.at_rest(before.open_files + 4)
        assert leases == 0


@pytest.mark.parametrize(
    ("body", "verdict"),
    [
        (event("a") + DONE + b"\r\n" + END, "200"),
        (event("a") + DONE, "broken"),
        (event("a") + b"\r\n" + END, "wrong"),
    ],
)
def test_a_stream_that_pretends_an_end_is_seen(body: bytes, verdict: str) -> None:
    assert judged(HEAD + body, streamed=True) == verdict


def test_memory_that_grows_has_a_slope() -> None:
    assert slope([Sample(float(s), 1000 + 50 * s, 1) for s in range(10)]) == pytest.approx(50)
    assert slope([Sample(float(s), 1000, 1) for s in range(10)]) == pytest.approx(0)
    assert slope([]) == 0
