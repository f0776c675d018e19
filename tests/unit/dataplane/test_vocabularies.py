"""Vocabularies asked of servers over real sockets, and when they are not believed."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from router.core.health import HealthState, ServerHealth
from router.core.parity import ServerFacts
from router.core.tokens import TokenModel
from router.core.types import Role, ServerSpec
from router.dataplane.vocabularies import BATCH_IDS, VocabularyReader

pytestmark = pytest.mark.anyio

DEADLINE_S = 20.0
IDS = 1_300
WORDS = [" w" + chr(97 + n // 676) + chr(97 + n // 26 % 26) + chr(97 + n % 26) for n in range(IDS)]


class Engine:
    """A server that has a vocabulary; ids past its end are no text, as in SGLang."""

    def __init__(self, words: list[str], *, fails: dict[int, int] | None = None) -> None:
        self.words = words
        self.fails = {} if fails is None else fails  # status by how many requests came before
        self.asked: list[int] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A test may end in the middle of a reading.
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            await self._answer(reader, writer)
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert head.startswith(b"post /detokenize ")
        length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
        ids = [each for (each,) in json.loads(await reader.readexactly(length))["tokens"]]
        status = self.fails.get(len(self.asked), 200)
        self.asked.append(ids[0])
        texts = [self.words[each] if each < len(self.words) else "" for each in ids]
        body = json.dumps({"text": texts}).encode()
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n" % (status, len(body)))
        writer.write(b"Connection: close\r\n\r\n" + body)
        await writer.drain()


class Rig:
    """Servers, what is known of them, and the token models that are to be told."""

    def __init__(self, *engines: Engine) -> None:
        self.engines = {f"s{n}": engine for n, engine in enumerate(engines)}
        self.health = {name: ServerHealth(state=HealthState.UP) for name in self.engines}
        self.model_names: dict[str, str | None] = dict.fromkeys(self.engines, "m")
        self.models = {name: TokenModel() for name in self.engines}

    def facts(self, name: str) -> ServerFacts:
        return ServerFacts(name, served_model_name=self.model_names[name])

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Rig"]:
        sockets, specs = [], []
        for name, engine in self.engines.items():
            sockets.append(await asyncio.start_server(engine.serve, "127.0.0.1", 0))
            port = sockets[-1].sockets[0].getsockname()[1]
            specs.append(ServerSpec(name, Role.SPEC, f"http://127.0.0.1:{port}"))
        reader = VocabularyReader(
            specs, self.health, self.facts, self.models, pause_s=0.001, idle_pause_s=0.01
        )
        reader.start()
        try:
            yield self
        finally:
            await reader.aclose()
            for socket in sockets:
                socket.close()
                await socket.wait_closed()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():  # noqa: ASYNC110  (the reader has no event)
                await asyncio.sleep(0.005)

    def size(self, name: str) -> int | None:
        vocabulary = self.models[name].vocabulary
        return None if vocabulary is None else vocabulary.size


async def test_a_vocabulary_is_read_to_its_end_and_used() -> None:
    engine = Engine(WORDS)
    async with Rig(engine).running() as rig:
        await rig.until(lambda: rig.size("s0"))
        assert rig.size("s0") == IDS
        vocabulary = rig.models["s0"].vocabulary
        assert vocabulary is not None
        assert vocabulary.count(WORDS[12] + WORDS[1_299]) == 2
    assert engine.asked[:3] == [0, BATCH_IDS, 2 * BATCH_IDS]


async def test_it_is_read_again_only_where_the_model_is_another() -> None:
    engine = Engine(WORDS)
    async with Rig(engine).running() as rig:
        await rig.until(lambda: rig.size("s0"))
        asked = len(engine.asked)
        rig.model_names["s0"] = "other"
        await rig.until(lambda: len(engine.asked) > asked)
        assert engine.asked[asked] == 0


async def test_servers_of_one_model_share_one() -> None:
    engines = Engine(WORDS), Engine(WORDS)
    async with Rig(*engines).running() as rig:
        await rig.until(lambda: rig.size("s0") and rig.size("s1"))
        assert rig.models["s0"].vocabulary is rig.models["s1"].vocabulary
    assert min(len(engine.asked) for engine in engines) == 0


async def test_servers_of_two_models_have_their_own() -> None:
    rig = Rig(Engine(WORDS), Engine(WORDS[:1_100]))
    rig.model_names["s1"] = "n"
    async with rig.running():
        await rig.until(lambda: rig.size("s0") and rig.size("s1"))
    assert (rig.size("s0"), rig.size("s1")) == (IDS, 1_100)


async def test_special_tokens_in_front_are_no_end() -> None:
    async with Rig(Engine([""] * 1_000 + WORDS)).running() as rig:
        await rig.until(lambda: rig.size("s0"))
    assert rig.size("s0") == IDS


async def test_parts_of_characters_are_left_out() -> None:
    async with Rig(Engine([*WORDS, "\ufffd", " \ufffd"])).running() as rig:
        await rig.until(lambda: rig.size("s0"))
    assert rig.size("s0") == IDS


async def test_a_failure_is_no_end() -> None:
    engine = Engine(WORDS, fails={2: 500, 3: 503})
    async with Rig(engine).running() as rig:
        await rig.until(lambda: rig.size("s0"))
    assert rig.size("s0") == IDS
    assert engine.asked[1:5] == [BATCH_IDS, 2 * BATCH_IDS, 2 * BATCH_IDS, 2 * BATCH_IDS]


async def test_an_error_past_the_end_is_the_end() -> None:
    engine = Engine(WORDS, fails={6: 400})
    async with Rig(engine).running() as rig:
        await rig.until(lambda: rig.size("s0"))
    assert rig.size("s0") == IDS
    assert len(engine.asked) == 7


@pytest.mark.parametrize(
    "engine",
    [Engine(WORDS, fails={0: 404}), Engine(WORDS, fails={5: 403}), Engine(WORDS[:90])],
    ids=["no such path", "not allowed in the midst", "too few tokens"],
)
async def test_a_server_that_has_none_to_tell_is_left_in_peace(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "crossover.tokens")
    async with Rig(engine).running() as rig:
        await rig.until(lambda: "tells no vocabulary" in caplog.text)
        assert rig.size("s0") is None


async def test_a_server_that_is_down_or_unknown_is_not_asked() -> None:
    engines = Engine(WORDS), Engine(WORDS), Engine(WORDS)
    rig = Rig(*engines)
    rig.health["s0"].state = HealthState.UNREACHABLE
    rig.model_names["s1"] = None
    async with rig.running():
        await rig.until(lambda: rig.size("s2"))
    assert [len(engine.asked) > 0 for engine in engines] == [False, False, True]
