"""Which paths go to an engine. An allow-list: what is not named here is not relayed.

A path is matched as it came over the wire, letter by letter. Nothing is decoded, folded or
normalised on the way to a match, so the path that is forwarded is the path that was judged. Only
the model name at the end of `/v1/models/` may carry percent signs, and it must decode to plain
segments.

Paths that change an engine's state (control paths) are recognised in any disguise, so that a probe
for one is answered with 403 rather than with 404; only the plain spelling can ever be relayed.
"""

import posixpath
from dataclasses import dataclass
from urllib.parse import unquote

DONE = b"[DONE]"
MESSAGE_STOP = b'"message_stop"}'

_POST = frozenset({"POST"})
_WRITE = frozenset({"POST", "PUT"})
_READ = frozenset({"GET", "HEAD"})
_CONTROL_METHODS = frozenset({"GET", "POST", "PUT", "DELETE"})


@dataclass(frozen=True, slots=True)
class Inference:
    """A path that is relayed.

    `endpoint` is its label. `prompt_keys` name the body's keys that hold the prompt; in a
    `conversation` a list is one prompt, elsewhere it is a batch. `rid_key` is the key under which
    the engine takes an id by which the request can be aborted. `end_marker` are the last bytes
    of the last data of a complete event stream. `token_marker` is found in the first chunk that
    carries a token, where events come before it; elsewhere the first event does. `continues_key`
    is the key of the stored response that a request goes on from.
    """

    endpoint: str
    methods: frozenset[str] = _POST
    prompt_keys: tuple[str, ...] = ()
    conversation: bool = False
    rid_key: str | None = None
    end_marker: bytes | None = None
    token_marker: bytes | None = None
    continues_key: str | None = None


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response that one of the engines keeps: relayed, as `route`, to the engine that does."""

    response_id: str
    route: Inference

    @property
    def endpoint(self) -> str:
        """Its label."""
        return self.route.endpoint


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """An engine's configuration: relayed without its keys."""

    endpoint: str = "/server_info"


@dataclass(frozen=True, slots=True)
class Control:
    """A path that changes an engine's state. A `disguised` one is never relayed."""

    disguised: bool = False
    endpoint: str = "control"


@dataclass(frozen=True, slots=True)
class Unknown:
    """No path of ours; or, if `allow` is not empty, one of ours with a method not among these."""

    allow: frozenset[str] = frozenset()
    endpoint: str = "other"


Route = Inference | StoredResponse | ServerInfo | Control | Unknown

_CHAT = Inference("/v1/chat/completions", _POST, ("messages", "tools"), True, "rid", DONE)
_MODELS = Inference("/v1/models", _READ)
_MODEL = Inference("/v1/models/{model}", _READ)
_MODEL_PREFIX = "/v1/models/"
_RESPONSE_PREFIX = "/v1/responses/"
_READ_RESPONSE = Inference("/v1/responses/{id}", _READ)
_CANCEL_RESPONSE = Inference("/v1/responses/{id}/cancel", _POST)

_ROUTES: dict[str, Inference | ServerInfo] = {
    route.endpoint: route
    for route in (
        _CHAT,
        Inference("/v1/completions", _POST, ("prompt",), False, "rid", DONE),
        Inference(
            "/v1/responses",
            prompt_keys=("instructions", "input", "tools"),
            conversation=True,
            rid_key="request_id",
            token_marker=b".delta",
            continues_key="previous_response_id",
        ),
        Inference("/v1/messages", _POST, ("system", "messages", "tools"), True, None, MESSAGE_STOP),
        Inference("/v1/messages/count_tokens", _POST),
        Inference("/v1/embeddings", _POST, ("input",), False, "rid"),
        Inference("/v1/classify", _POST, ("input",), False, "rid"),
        Inference("/v1/score", _POST, ("items", "text_2")),
        Inference("/v1/rerank", _WRITE, ("documents",)),
        Inference("/v1/audio/transcriptions", _POST, (), False, None, DONE),
        Inference("/v1/tokenize", _POST),
        Inference("/v1/detokenize", _POST),
        Inference("/tokenize", _POST),
        Inference("/detokenize", _POST),
        Inference("/generate", _WRITE, ("text", "input_ids"), False, "rid", DONE),
        Inference("/encode", _WRITE, ("text", "input_ids"), False, "rid"),
        Inference("/classify", _WRITE, ("text", "input_ids"), False, "rid"),
        Inference("/invocations", _POST, ("messages", "tools"), True, "rid", DONE),
        Inference("/vertex_generate", _POST, ("instances",)),
        Inference("/api/chat", _POST, ("messages",), True),
        Inference("/api/generate", _POST, ("prompt",)),
        Inference("/api/show", _POST),
        Inference("/api/tags", _READ),
        Inference("/parse_function_call", _POST),
        Inference("/separate_reasoning", _POST),
        _MODELS,
        Inference("/get_model_info", _READ),
        Inference("/model_info", _READ),
        ServerInfo("/server_info"),
        ServerInfo("/get_server_info"),
    )
}

_CONTROL_PREFIXES = (
    "/abort_request",
    "/add_external_corpus",
    "/clear_hicache_storage_backend",
    "/close_session",
    "/configure_logging",
    "/continue_generation",
    "/destroy_weights_update_group",
    "/dump_expert_distribution_record",
    "/dumper",
    "/flush_cache",
    "/freeze_gc",
    "/get_remote_instance_transfer_engine_info",
    "/get_weights_by_name",
    "/hicache",
    "/init_weights",
    "/list_external_corpora",
    "/load_lora_adapter",
    "/open_session",
    "/pause_generation",
    "/release_memory",
    "/remote_instance_transfer_engine_info",
    "/remove_external_corpus",
    "/resume_memory",
    "/send_weights",
    "/set_internal_state",
    "/set_trace_level",
    "/slow_down",
    "/start_expert_distribution_record",
    "/start_profile",
    "/stop_expert_distribution_record",
    "/stop_profile",
    "/unload_lora_adapter",
    "/update_weight",
    "/weights_checker",
)

_DECODE_ROUNDS_MAX = 4


def classify(method: str, path: str) -> Route:
    """Return the route of a request.

    `path` is the raw one: still percent-encoded, without its query.
    """
    route = _ROUTES.get(path)
    if route is None and path.startswith(_MODEL_PREFIX) and _is_plain(path):
        route = _MODEL
    if route is not None:
        methods = route.methods if isinstance(route, Inference) else _READ
        return route if method in methods else Unknown(methods)
    if path.startswith(_RESPONSE_PREFIX) and "%" not in path and _is_plain(path):
        return _stored(method, path)
    if path.startswith(_CONTROL_PREFIXES) and "%" not in path and _is_plain(path):
        return Control() if method in _CONTROL_METHODS else Unknown(_CONTROL_METHODS)
    if _undisguised(path).startswith(_CONTROL_PREFIXES):
        return Control(disguised=True)
    return Unknown()


def _stored(method: str, path: str) -> Route:
    response_id, *more = path.removeprefix(_RESPONSE_PREFIX).split("/")
    if more not in ([], ["cancel"]):
        return Unknown()
    route = _CANCEL_RESPONSE if more else _READ_RESPONSE
    return StoredResponse(response_id, route) if method in route.methods else Unknown(route.methods)


def _is_plain(path: str) -> bool:
    """Whether no reader, however lenient, can take the path for another one."""
    decoded = unquote(path, errors="replace")
    if not decoded.isprintable() or any(char in decoded for char in "%\\;\ufffd"):
        return False
    return all(segment not in ("", ".", "..") for segment in decoded.split("/")[1:])


def _undisguised(path: str) -> str:
    """Return the path as the most lenient reader might take it."""
    for _ in range(_DECODE_ROUNDS_MAX):
        decoded = unquote(path, errors="replace")
        if decoded == path:
            break
        path = decoded
    path = "".join(char for char in path if char.isprintable() and not char.isspace())
    path = path.replace("\\", "/").replace(";", "/").casefold()
    return "/" + posixpath.normpath("/" + path).lstrip("/")
