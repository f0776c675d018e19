"""What a server tells of its settings, read from SGLang's `/server_info` and `/v1/models`.

Only the fields named here are ever looked at: `/server_info` also holds the server's keys. A value
of the wrong type or range counts as not told.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.core.parity import ServerFacts
from router.core.types import Role, ServerSpec
from router.dataplane.engine_api import EngineApi, EngineError, NoAnswerError

TEXT_CHARS_MAX = 256
NUMBER_MAX = 2**31

_NOT_FOUND = 404
_SERVER_ERROR = 500


@dataclass(frozen=True, slots=True)
class Told:
    """A server's facts, and what is odd about this server alone. None of it is a secret."""

    facts: ServerFacts
    remarks: tuple[str, ...] = ()


async def read_facts(server: ServerSpec, api: EngineApi) -> Told | None:
    """Ask a server for its facts; None if it gives no answer now and is to be asked again."""
    try:
        info = await _server_info(server, api)
        models = await api.get_json(server, "/v1/models")
    except NoAnswerError as error:
        if error.status is None or error.status >= _SERVER_ERROR:
            return None
        remark = f"server {server.name} does not tell its settings ({error}): not compared"
        return Told(ServerFacts(server.name), (remark,))
    except EngineError:
        return None
    return _told(server, info, models)


async def _server_info(server: ServerSpec, api: EngineApi) -> dict[str, Any]:
    try:
        return await api.get_json(server, "/server_info")
    except NoAnswerError as error:
        if error.status != _NOT_FOUND:
            raise
        return await api.get_json(server, "/get_server_info")  # its name before 0.5


def _told(server: ServerSpec, info: Mapping[str, Any], models: Mapping[str, Any]) -> Told:
    cards = models.get("data")
    card = cards[0] if isinstance(cards, list) and cards and isinstance(cards[0], dict) else {}
    dtype = _text(info.get("dtype"))
    facts = ServerFacts(
        name=server.name,
        served_model_name=_text(card.get("id")) or _text(info.get("served_model_name")),
        context_length=_number(card.get("max_model_len")) or _number(info.get("context_length")),
        version=_text(info.get("version")),
        dtype=None if dtype == "auto" else dtype,
        max_running_requests=_max_running_requests(info),
        chat_template=_chat_template(info),
    )
    return Told(facts, tuple(_role_remarks(server, info)))


def _role_remarks(server: ServerSpec, info: Mapping[str, Any]) -> Sequence[str]:
    if "speculative_algorithm" not in info:
        return ()
    speculates = info["speculative_algorithm"] is not None
    if speculates == (server.role is Role.SPEC):
        return ()
    does = "speculates" if speculates else "does not speculate"
    return (f"server {server.name} has role {server.role}, but {does}: are the URLs swapped?",)


def _max_running_requests(info: Mapping[str, Any]) -> int | None:
    """Return what is in force, over all data-parallel ranks; the setting itself may be unset."""
    states = info.get("internal_states")
    if isinstance(states, list) and states and all(isinstance(state, dict) for state in states):
        key = "effective_max_running_requests_per_dp"
        in_force = [_number(state.get(key)) for state in states]
        if all(in_force):
            return sum(number for number in in_force if number)
    return _number(info.get("max_running_requests"))


def _chat_template(info: Mapping[str, Any]) -> str | None:
    if "chat_template" not in info:
        return None
    return "the model's own" if info["chat_template"] is None else _text(info["chat_template"])


def _text(value: object) -> str | None:
    if isinstance(value, str) and value.isprintable() and 0 < len(value) <= TEXT_CHARS_MAX:
        return value
    return None


def _number(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 < value <= NUMBER_MAX else None
