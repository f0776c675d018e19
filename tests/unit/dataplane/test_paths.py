import pytest

from router.dataplane.paths import (
    Control,
    Inference,
    ServerInfo,
    StoredResponse,
    Unknown,
    classify,
)

# Every path of SGLang 0.5.12.post1 that changes an engine's state or reads its weights.
CONTROL = """
/set_internal_state /dumper/dump /flush_cache /add_external_corpus /remove_external_corpus
/list_external_corpora /clear_hicache_storage_backend /hicache/storage-backend/clear
/hicache/storage-backend /start_profile /stop_profile /set_trace_level /freeze_gc
/start_expert_distribution_record /stop_expert_distribution_record
/dump_expert_distribution_record /update_weights_from_disk
/init_weights_send_group_for_remote_instance /send_weights_to_remote_instance
/get_remote_instance_transfer_engine_info /remote_instance_transfer_engine_info
/init_weights_update_group /destroy_weights_update_group /update_weights_from_tensor
/update_weights_from_distributed /update_weights_from_ipc /update_weight_version
/get_weights_by_name /release_memory_occupation /resume_memory_occupation /weights_checker
/slow_down /load_lora_adapter /load_lora_adapter_from_tensors /unload_lora_adapter /open_session
/close_session /configure_logging /abort_request /pause_generation /continue_generation
""".split()  # noqa: SIM905  (a list to be read)

INFERENCE = """
/v1/chat/completions /v1/completions /v1/responses /v1/messages /v1/messages/count_tokens
/v1/embeddings /v1/classify /v1/score /v1/rerank /v1/tokenize /v1/detokenize /tokenize
/detokenize /generate /encode /classify /invocations /vertex_generate /api/chat /api/generate
/v1/audio/transcriptions
""".split()  # noqa: SIM905  (a list to be read)


@pytest.mark.parametrize("path", INFERENCE)
def test_inference_paths_are_relayed_under_their_own_label(path: str) -> None:
    route = classify("POST", path)
    assert isinstance(route, Inference)
    assert route.endpoint == path


@pytest.mark.parametrize("path", ["/v1/models", "/get_model_info", "/model_info", "/api/tags"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_descriptions_of_the_model_are_relayed(path: str, method: str) -> None:
    assert isinstance(classify(method, path), Inference)


@pytest.mark.parametrize("path", CONTROL)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_control_paths_are_known(path: str, method: str) -> None:
    assert classify(method, path) == Control()


def test_a_control_path_that_a_later_engine_adds_is_not_relayed() -> None:
    assert classify("POST", "/reboot_everything") == Unknown()


DISGUISES = ["/{}", "/.{}", "/x/..{}", "{}/", "{};v=1", "{}%20", "{}%00", "/%2f{}", "{}%2f"]


@pytest.mark.parametrize("path", CONTROL)
@pytest.mark.parametrize("disguise", DISGUISES)
def test_a_control_path_in_disguise_is_never_relayed(path: str, disguise: str) -> None:
    assert not isinstance(classify("POST", disguise.format(path)), Inference)
    assert classify("POST", disguise.format(path)) != Control()


@pytest.mark.parametrize(
    "path",
    [
        "//flush_cache", "/FLUSH_CACHE", "/flush%5fcache", "/%66lush_cache", "/%2566lush_cache",
        "/a/../flush_cache", "/a/%2e%2e/flush_cache", "/v1/models/../../flush_cache",
        "/v1/models/..%2F..%2Fflush_cache", "/\\flush_cache", "/flush_cache/", "/flush_cache%0d",
    ],
)  # fmt: skip
def test_a_disguise_is_seen_through(path: str) -> None:
    assert classify("POST", path) == Control(disguised=True)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models/", "/v1/models//a", "/v1/models/.", "/v1/models/a/../b",
        "/v1/models/a%2f..%2fb", "/v1/models/%2e%2e", "/v1/models/a%252fb",
        "/v1/models/a%00", "/v1/models/a\\b", "/v1/models/%ff", "/v1/models/a;b",
    ],
)  # fmt: skip
def test_a_model_name_that_another_reader_might_take_for_a_path_is_not_relayed(path: str) -> None:
    assert classify("GET", path) == Unknown()


@pytest.mark.parametrize("name", ["llama", "meta-llama/Llama-3", "meta-llama%2FLlama-3", "a%20b"])
def test_a_model_name_is_relayed(name: str) -> None:
    route = classify("GET", f"/v1/models/{name}")
    assert isinstance(route, Inference)
    assert route.endpoint == "/v1/models/{model}"


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/generate", {"POST", "PUT"}),
        ("DELETE", "/v1/models", {"GET", "HEAD"}),
        ("POST", "/server_info", {"GET", "HEAD"}),
        ("PATCH", "/flush_cache", {"GET", "POST", "PUT", "DELETE"}),
    ],
)
def test_a_wrong_method_learns_the_right_ones(method: str, path: str, allow: set[str]) -> None:
    assert classify(method, path) == Unknown(frozenset(allow))


@pytest.mark.parametrize(
    "path", ["/", "", "/v1", "/V1/models", "/v1/chat/completions/", "/metrics"]
)
def test_what_is_not_listed_is_unknown(path: str) -> None:
    assert classify("GET", path) == Unknown()


def test_server_info_is_a_route_of_its_own() -> None:
    assert isinstance(classify("GET", "/server_info"), ServerInfo)
    assert isinstance(classify("GET", "/get_server_info"), ServerInfo)


def test_ids_go_where_the_engine_takes_them() -> None:
    keys = {path: classify("POST", path) for path in INFERENCE}
    taken = {path: r.rid_key for path, r in keys.items() if isinstance(r, Inference) and r.rid_key}
    assert taken == {
        "/v1/chat/completions": "rid",
        "/v1/completions": "rid",
        "/v1/responses": "request_id",
        "/v1/embeddings": "rid",
        "/v1/classify": "rid",
        "/generate": "rid",
        "/encode": "rid",
        "/classify": "rid",
        "/invocations": "rid",
    }


@pytest.mark.parametrize(
    ("method", "path", "endpoint"),
    [
        ("GET", "/v1/responses/resp_1", "/v1/responses/{id}"),
        ("HEAD", "/v1/responses/resp_1", "/v1/responses/{id}"),
        ("POST", "/v1/responses/resp_1/cancel", "/v1/responses/{id}/cancel"),
    ],
)
def test_a_stored_response_is_read_and_cancelled(method: str, path: str, endpoint: str) -> None:
    route = classify(method, path)
    assert isinstance(route, StoredResponse)
    assert (route.response_id, route.endpoint) == ("resp_1", endpoint)


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("DELETE", "/v1/responses/resp_1", {"GET", "HEAD"}),
        ("GET", "/v1/responses/resp_1/cancel", {"POST"}),
        ("GET", "/v1/responses/resp_1/input_items", set()),
        ("GET", "/v1/responses/", set()),
        ("GET", "/v1/responses/..", set()),
        ("GET", "/v1/responses/a%2Fb", set()),
        ("GET", "/v1/responses//cancel", set()),
        ("POST", "/v1/responses/a/cancel/b", set()),
    ],
)
def test_nothing_else_below_responses_is_relayed(method: str, path: str, allow: set[str]) -> None:
    assert classify(method, path) == Unknown(frozenset(allow))
