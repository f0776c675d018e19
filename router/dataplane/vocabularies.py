"""Asks each model's vocabulary of its server once, so that tokens are counted where none are told.

SGLang's `/detokenize` turns ids into text: some hundred small requests, a few a second, are a whole
vocabulary. Each takes a few milliseconds of the engine's HTTP process, and nothing of its model. A
server without that path is left in peace; its tokens are estimated.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from router.core.health import ServerHealth
from router.core.parity import ServerFacts
from router.core.tokens import TokenModel
from router.core.types import ServerSpec
from router.core.vocabulary import TOKEN_CHARACTERS_MAX, Vocabulary
from router.dataplane.engine_api import EngineApi, EngineError, NoAnswerError
from router.dataplane.watch import Watch
from router.settings import NO_ACCESS, Access

PATH = "/detokenize"
BATCH_IDS = 256
PAUSE_S = 0.1
# While there is nothing to read, and after an answer that was none.
IDLE_PAUSE_S = 5.0
ANSWER_TIMEOUT_S = 10.0
IDS_MAX = 2**19
TOKENS_MIN = 100  # fewer are no vocabulary
# Ids past the end are no text, as special tokens are; the longest run of those known is 1,000.
_BLANK_BATCHES_MAX = 8
_UNDECODABLE = "\ufffd"  # what a part of a character becomes
_PAST_THE_END = 400  # which some tokenizers take for an error
_REFUSED = (401, 403, 404, 405)

_log = logging.getLogger("crossover.tokens")


@dataclass(slots=True)
class _Reading:
    """What is read of a server, and of which model that is."""

    model: str
    tokens: list[str] = field(default_factory=list)
    next_id: int = 0
    blank_batches: int = 0
    failed: bool = False
    done: bool = False


class VocabularyReader:
    """Gives every server's token model its vocabulary. Servers of one model name share one."""

    def __init__(
        self,
        servers: Sequence[ServerSpec],
        health: Mapping[str, ServerHealth],
        facts: Callable[[str], ServerFacts | None],
        models: Mapping[str, TokenModel],
        access: Mapping[str, Access] = NO_ACCESS,
        *,
        pause_s: float = PAUSE_S,
        idle_pause_s: float = IDLE_PAUSE_S,
    ) -> None:
        self._health = health
        self._facts = facts
        self._models = models
        self._access = access
        self._reading_pause_s, self._idle_pause_s = pause_s, idle_pause_s
        self._readings: dict[str, _Reading] = {}
        self._watch = Watch("vocabulary", servers, self._ask, self._pause_s, _log)

    def start(self) -> None:
        """Begin, on the running loop."""
        self._watch.start(EngineApi(ANSWER_TIMEOUT_S, self._access))

    async def aclose(self) -> None:
        """End, and wait until all is closed."""
        await self._watch.aclose()

    def _pause_s(self, server: ServerSpec) -> float:
        reading = self._readings.get(server.name)
        idle = reading is None or reading.done or reading.failed
        return self._idle_pause_s if idle else self._reading_pause_s

    async def _ask(self, server: ServerSpec, api: EngineApi) -> None:
        facts = self._facts(server.name)
        if not self._health[server.name].up or facts is None or facts.served_model_name is None:
            return
        model = facts.served_model_name
        reading = self._readings.get(server.name)
        if reading is None or reading.model != model:
            if self._is_read_elsewhere(server, model):
                return
            reading = self._readings[server.name] = self._begin(server, model)
        if not reading.done:
            await self._read_batch(server, api, reading)

    def _is_read_elsewhere(self, server: ServerSpec, model: str) -> bool:
        return any(
            reading.model == model and not reading.done and self._health[name].up
            for name, reading in self._readings.items()
            if name != server.name
        )

    def _begin(self, server: ServerSpec, model: str) -> _Reading:
        """Forget what the server had before; take over what another of the same model has."""
        others = [
            self._models[name].vocabulary
            for name, reading in self._readings.items()
            if reading.model == model and name != server.name
        ]
        known = next((vocabulary for vocabulary in others if vocabulary is not None), None)
        self._models[server.name].use(known)
        if known is not None:
            _tell(server, known)
        return _Reading(model, done=known is not None)

    async def _read_batch(self, server: ServerSpec, api: EngineApi, reading: _Reading) -> None:
        reading.failed = True
        ids = range(reading.next_id, reading.next_id + BATCH_IDS)
        try:
            answer = await api.post_json(server, PATH, {"tokens": [[each] for each in ids]})
        except NoAnswerError as error:
            if error.status in _REFUSED:
                reading.tokens.clear()
            if error.status in (*_REFUSED, _PAST_THE_END):
                await self._end(server, reading)
            return
        except EngineError:
            return  # the probes tell who is down
        texts = answer.get("text")
        if not isinstance(texts, list) or len(texts) != BATCH_IDS:
            reading.tokens.clear()
            await self._end(server, reading)
            return
        reading.failed = False
        reading.tokens += [text for text in texts if _is_token(text)]
        reading.next_id += BATCH_IDS
        reading.blank_batches = 0 if any(texts) else reading.blank_batches + 1
        if reading.blank_batches == _BLANK_BATCHES_MAX or reading.next_id >= IDS_MAX:
            await self._end(server, reading)

    async def _end(self, server: ServerSpec, reading: _Reading) -> None:
        tokens, reading.tokens = reading.tokens, []
        reading.done = True
        if len(tokens) < TOKENS_MIN:
            _log.info("server %s tells no vocabulary: its tokens are estimated", server.name)
            return
        # Half a second of work, which streams would wait for.
        vocabulary = await asyncio.to_thread(Vocabulary, tokens)
        self._models[server.name].use(vocabulary)
        _tell(server, vocabulary)


def _tell(server: ServerSpec, vocabulary: Vocabulary) -> None:
    _log.info("server %s has a vocabulary of %d tokens", server.name, vocabulary.size)


def _is_token(text: object) -> bool:
    if not isinstance(text, str) or _UNDECODABLE in text:
        return False
    return 0 < len(text) <= TOKEN_CHARACTERS_MAX
