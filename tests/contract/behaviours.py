"""What a router relies on in an SGLang 0.5.12.post1 server, as functions of one server.

The simulated engine and the real one must both show every behaviour: a simulation that differs
where a router can notice would teach the router something false.
"""

import asyncio
import itertools
import json
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
GENERATE = "/generate"


@dataclass(frozen=True)
class Target:
    """A server to examine. It must be idle, and nothing else may use it.

    `capacity` is its max_running_requests, `queue_limit` its max_queued_requests if set.
    `long_tokens` is an output that outlasts every other step of a test; `patience_s` bounds each
    wait. `prompt` is any text it knows.
    """

    url: str
    capacity: int
    long_tokens: int
    context_tokens: int
    model: str = "default"
    prompt: str = "t5 t6 t7"
    speculative: bool = False
    queue_limit: int | None = None
    patience_s: float = 30.0

    def body(self, api: str, tokens: int, **more: Any) -> dict[str, Any]:
        """A request for exactly so many tokens."""
        if api == GENERATE:
            sampling = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0}
            return {"text": self.prompt, "sampling_params": sampling, **more}
        text: dict[str, Any] = {"prompt": self.prompt}
        if api == CHAT:
            text = {"messages": [{"role": "user", "content": self.prompt}]}
        fixed = {"model": self.model, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
        return {**text, **fixed, **more}


Behaviour = Callable[[Target], Awaitable[None]]
BEHAVIOURS: dict[str, Behaviour] = {}


def behaviour(function: Behaviour) -> Behaviour:
    BEHAVIOURS[function.__name__] = function
    return function


def client_of(target: Target) -> httpx.AsyncClient:
    timeout = httpx.Timeout(target.patience_s)
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=target.url, timeout=timeout, limits=limits)


async def events(response: httpx.Response) -> AsyncIterator[str]:
    """The data of each event. Events are separated by one blank line and have nothing but data."""
    rest = ""
    async for text in response.aiter_text():
        *whole, rest = (rest + text).split("\n\n")
        for event in whole:
            assert event.startswith("data: ")
            yield event.removeprefix("data: ")
    assert rest == ""


async def stream(target: Target, api: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All events of a stream that ends well."""
    async with client_of(target) as client, client.stream("POST", api, json=body) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        seen = [event async for event in events(response)]
    assert seen[-1] == "[DONE]"
    return [json.loads(event) for event in seen[:-1]]


async def post(target: Target, path: str, body: Any) -> httpx.Response:
    async with client_of(target) as client:
        return await client.post(path, json=body)


async def get(target: Target, path: str) -> httpx.Response:
    async with client_of(target) as client:
        return await client.get(path)


async def load(target: Target) -> dict[str, Any]:
    response = await get(target, "/v1/loads")
    found: dict[str, Any] = response.json()["loads"][0]
    return found


async def until_load(target: Target, **wanted: int) -> None:
    """Poll until the load is as wanted."""
    deadline = time.monotonic() + target.patience_s
    while True:
        found = await load(target)
        if all(found[name] == value for name, value in wanted.items()):
            return
        assert time.monotonic() < deadline, f"still {found}, not {wanted}"
        await asyncio.sleep(0.01)


async def metric(target: Target, name: str) -> float:
    """The sum over a metric's labels."""
    text = (await get(target, "/metrics")).text
    values = re.findall(rf"^sglang:{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, values))


@asynccontextmanager
async def long_streams(target: Target, count: int) -> AsyncIterator[list[httpx.Response]]:
    """Streams that have begun and go on; closed at the end, and gone from the engine."""
    body = target.body(COMPLETION, target.long_tokens, stream=True)
    async with client_of(target) as client:

        async def begin() -> httpx.Response:
            request = client.build_request("POST", COMPLETION, json=body)
            return await client.send(request, stream=True)

        responses = await asyncio.gather(*(begin() for _ in range(count)))
        try:
            yield responses
        finally:
            await asyncio.gather(*(response.aclose() for response in responses))
    await until_load(target, num_running_reqs=0, num_waiting_reqs=0)


def assert_flat_error(response: httpx.Response, status: int, kind: str) -> None:
    assert response.status_code == status
    error = response.json()
    assert set(error) == {"object", "message", "type", "param", "code"}
    assert error["object"] == "error"
    assert error["code"] == status
    assert error["type"] == kind
    assert error["message"]


# Shapes


@behaviour
async def a_chat_stream_is_role_then_text_then_finish(target: Target) -> None:
    chunks = await stream(target, CHAT, target.body(CHAT, 8, stream=True))
    first, *texts, last = chunks
    assert list(first) == ["id", "object", "created", "model", "choices"]
    assert list(first["choices"][0]) == [
        "index",
        "delta",
        "logprobs",
        "finish_reason",
        "matched_stop",
    ]
    delta = {"reasoning_content": None, "role": "assistant", "content": ""}
    assert first["choices"][0]["delta"] == delta
    assert texts
    for chunk in texts:
        assert list(chunk["choices"][0]["delta"]) == ["reasoning_content", "content"]
        assert chunk["choices"][0]["delta"]["content"]
        assert chunk["choices"][0]["finish_reason"] is None
    assert last["choices"][0]["delta"] == {"reasoning_content": None}
    assert last["choices"][0]["finish_reason"] == "length"
    assert {chunk["id"] for chunk in chunks} == {first["id"]}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


@behaviour
async def a_completion_stream_says_with_its_last_text_why_it_ended(target: Target) -> None:
    chunks = await stream(target, COMPLETION, target.body(COMPLETION, 8, stream=True))
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    assert list(chunks[0]) == ["id", "object", "created", "model", "choices", "usage"]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert list(chunks[0]["choices"][0]) == [
        "index",
        "text",
        "logprobs",
        "finish_reason",
        "matched_stop",
    ]


@behaviour
async def a_generate_stream_repeats_all_so_far(target: Target) -> None:
    items = await stream(target, GENERATE, target.body(GENERATE, 8, stream=True))
    counts = [item["meta_info"]["completion_tokens"] for item in items]
    assert counts == sorted(set(counts))
    assert counts[-1] == 8
    for before, after in itertools.pairwise(items):
        assert after["text"].startswith(before["text"])
    assert [len(item["output_ids"]) for item in items] == counts
    assert items[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 8}
    assert items[0]["meta_info"]["finish_reason"] is None
    assert set(items[0]["meta_info"]) >= {
        "id",
        "prompt_tokens",
        "weight_version",
        "num_retractions",
        "cached_tokens",
    }
    spec = {"spec_accept_length", "spec_verify_ct"}
    assert spec & set(items[-1]["meta_info"]) == (spec if target.speculative else set())


@behaviour
async def a_whole_reply_says_what_its_stream_says(target: Target) -> None:
    chat = (await post(target, CHAT, target.body(CHAT, 8))).json()
    chunks = await stream(target, CHAT, target.body(CHAT, 8, stream=True))
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert chat["object"] == "chat.completion"
    assert chat["choices"][0]["message"]["role"] == "assistant"
    assert chat["choices"][0]["message"]["content"] == text
    assert chat["choices"][0]["finish_reason"] == "length"

    whole = (await post(target, COMPLETION, target.body(COMPLETION, 8))).json()
    chunks = await stream(target, COMPLETION, target.body(COMPLETION, 8, stream=True))
    assert whole["object"] == "text_completion"
    assert whole["choices"][0]["text"] == "".join(c["choices"][0]["text"] for c in chunks)

    item = (await post(target, GENERATE, target.body(GENERATE, 8))).json()
    assert item["text"] == whole["choices"][0]["text"]
    assert item["meta_info"]["completion_tokens"] == 8


@behaviour
async def choices_and_prompts_are_told_apart_by_index(target: Target) -> None:
    body = target.body(COMPLETION, 4, prompt=[target.prompt] * 2, n=2)
    whole = (await post(target, COMPLETION, body)).json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert whole["usage"]["completion_tokens"] == 16
    chunks = await stream(target, COMPLETION, {**body, "stream": True})
    assert {chunk["choices"][0]["index"] for chunk in chunks} == {0, 1, 2, 3}

    batch = target.body(GENERATE, 4, text=[target.prompt] * 2)
    assert len((await post(target, GENERATE, batch)).json()) == 2
    items = await stream(target, GENERATE, {**batch, "stream": True})
    assert {item["index"] for item in items} == {0, 1}


@behaviour
async def a_speculating_engine_puts_a_steps_tokens_into_one_event(target: Target) -> None:
    options = {"include_usage": True}
    body = target.body(CHAT, 32, stream=True, stream_options=options)
    *chunks, usage = await stream(target, CHAT, body)
    texts = [c for c in chunks if c["choices"][0]["delta"].get("content")]
    assert usage["usage"]["completion_tokens"] == 32
    if target.speculative:
        assert len(texts) < 32
    assert len(texts) >= 32 / 4


# Usage


@behaviour
async def usage_counts_the_tokens_that_were_sent(target: Target) -> None:
    for api in (CHAT, COMPLETION):
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = target.body(api, 12, stream=True, stream_options=options)
        *chunks, last = await stream(target, api, body)
        assert last["choices"] == []
        counts = [c["usage"]["completion_tokens"] for c in chunks if c.get("usage")]
        assert counts == sorted(set(counts))
        assert counts[-1] == last["usage"]["completion_tokens"] == 12
        assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + 12
        whole = (await post(target, api, target.body(api, 12))).json()
        usage = whole["usage"]
        assert usage.pop("prompt_tokens_details") is None
        last["usage"].pop("prompt_tokens_details", None)
        assert usage == last["usage"]


@behaviour
async def usage_is_not_sent_unasked(target: Target) -> None:
    for api in (CHAT, COMPLETION):
        chunks = await stream(target, api, target.body(api, 4, stream=True))
        assert not any(chunk.get("usage") for chunk in chunks)
        assert all(chunk["choices"] for chunk in chunks)


# Waiting, aborting, leaving


@behaviour
async def a_waiting_stream_has_no_head_but_generate_has(target: Target) -> None:
    async with long_streams(target, target.capacity):
        await until_load(target, num_running_reqs=target.capacity)
        async with client_of(target) as client:
            chat = client.build_request("POST", CHAT, json=target.body(CHAT, 4, stream=True))
            waiting = asyncio.create_task(client.send(chat, stream=True))
            await until_load(target, num_waiting_reqs=1)
            body = target.body(GENERATE, 4, stream=True)
            async with client.stream("POST", GENERATE, json=body) as response:
                assert response.status_code == 200
                assert not waiting.done()
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)


@behaviour
async def an_abort_ends_a_running_stream_and_frees_it(target: Target) -> None:
    for api in (CHAT, COMPLETION):
        rid = uuid.uuid4().hex
        body = target.body(api, target.long_tokens, stream=True, rid=rid)
        async with client_of(target) as client, client.stream("POST", api, json=body) as response:
            seen = events(response)
            first = json.loads(await anext(seen))
            assert first["id"] == rid
            await until_load(target, num_running_reqs=1)
            assert (await post(target, "/abort_request", {"rid": rid})).status_code == 200
            rest = [event async for event in seen]
        assert rest[-1] == "[DONE]"
        assert json.loads(rest[-2])["choices"][0]["finish_reason"] == "abort"
        await until_load(target, num_running_reqs=0)


@behaviour
async def an_abort_reaches_all_that_a_live_rid_is_a_prefix_of(target: Target) -> None:
    async def run(rid: str) -> str:
        body = target.body(COMPLETION, target.long_tokens, rid=rid)
        response = await post(target, COMPLETION, body)
        assert response.status_code == 200, response.text
        reason: str = response.json()["choices"][0]["finish_reason"]
        return reason

    rid = uuid.uuid4().hex
    both = asyncio.gather(run(rid), run(f"{rid}-and-more"))
    await until_load(target, num_running_reqs=2)
    assert (await post(target, "/abort_request", {"rid": rid[:8]})).status_code == 200
    assert (await load(target))["num_running_reqs"] == 2
    await post(target, "/abort_request", {"rid": rid})
    assert set(await both) == {"abort"}
    await until_load(target, num_running_reqs=0)


@behaviour
async def a_client_that_leaves_frees_its_place(target: Target) -> None:
    aborted = await metric(target, "num_aborted_requests_total")
    async with long_streams(target, 2):
        await until_load(target, num_running_reqs=2)
    assert await metric(target, "num_aborted_requests_total") >= aborted + 2


@behaviour
async def a_full_queue_is_told_in_band_to_a_stream_and_by_status_otherwise(target: Target) -> None:
    if target.queue_limit is None:
        pytest.skip("this server has no queue limit")
    async with long_streams(target, target.capacity), client_of(target) as client:
        await until_load(target, num_running_reqs=target.capacity)
        bodies = [target.body(COMPLETION, 4) for _ in range(target.queue_limit)]
        queued = [asyncio.create_task(client.post(COMPLETION, json=body)) for body in bodies]
        await until_load(target, num_waiting_reqs=target.queue_limit)
        for api in (CHAT, COMPLETION):
            assert_flat_error(await post(target, api, target.body(api, 4)), 503, "503")
            (told,) = await stream(target, api, target.body(api, 4, stream=True))
            assert told["error"]["code"] == 503
            assert told["error"]["object"] == "error"
            assert told["error"]["type"] == "SERVICE_UNAVAILABLE"
        assert_flat_error(await post(target, GENERATE, target.body(GENERATE, 4)), 503, "503")
        (item,) = await stream(target, GENERATE, target.body(GENERATE, 4, stream=True))
        assert item["meta_info"]["finish_reason"]["status_code"] == 503
        for task in queued:
            task.cancel()
        await asyncio.gather(*queued, return_exceptions=True)


# Refusals


@behaviour
async def a_body_that_is_no_request_is_refused_with_a_flat_400(target: Target) -> None:
    async with client_of(target) as client:
        headers = {"content-type": "application/json"}
        broken = await client.post(CHAT, content=b"{x", headers=headers)
        assert_flat_error(broken, 400, "Bad Request")
        untyped = await client.post(CHAT, content=b"{}", headers={"content-type": "text/plain"})
        assert_flat_error(untyped, 400, "Bad Request")
    assert_flat_error(await post(target, CHAT, {"model": target.model}), 400, "Bad Request")
    assert_flat_error(await post(target, COMPLETION, {}), 400, "Bad Request")
    empty = target.body(CHAT, 4, messages=[])
    assert_flat_error(await post(target, CHAT, empty), 400, "BadRequestError")


@behaviour
async def a_request_longer_than_the_context_is_refused(target: Target) -> None:
    for api in (CHAT, COMPLETION):
        for more in ({}, {"stream": True}):
            body = target.body(api, target.context_tokens + 1, **more)
            response = await post(target, api, body)
            assert_flat_error(response, 400, "BadRequestError")
    response = await post(target, GENERATE, target.body(GENERATE, target.context_tokens + 1))
    assert response.status_code == 400
    assert list(response.json()) == ["error"]


@behaviour
async def a_live_rid_is_not_taken_twice(target: Target) -> None:
    rid = uuid.uuid4().hex
    body = target.body(COMPLETION, target.long_tokens, stream=True, rid=rid)
    async with (
        client_of(target) as client,
        client.stream("POST", COMPLETION, json=body) as response,
    ):
        assert await anext(events(response))
        again = await client.post(COMPLETION, json=target.body(COMPLETION, 4, rid=rid))
        assert_flat_error(again, 400, "BadRequestError")
    await until_load(target, num_running_reqs=0)


@behaviour
async def unknown_paths_and_methods_are_refused(target: Target) -> None:
    response = await get(target, "/no-such-path")
    assert (response.status_code, response.json()) == (404, {"detail": "Not Found"})
    response = await get(target, CHAT)
    assert (response.status_code, response.json()) == (405, {"detail": "Method Not Allowed"})
    assert response.headers["allow"] == "POST"


# What it says about itself


@behaviour
async def loads_have_the_fields_of_this_version(target: Target) -> None:
    answer = (await get(target, "/v1/loads")).json()
    assert set(answer) == {"timestamp", "version", "dp_rank_count", "loads", "aggregate"}
    assert set(answer["loads"][0]) >= {
        "num_running_reqs",
        "num_waiting_reqs",
        "num_total_reqs",
        "num_used_tokens",
        "num_total_tokens",
        "max_total_num_tokens",
        "token_usage",
        "gen_throughput",
        "cache_hit_rate",
        "utilization",
        "max_running_requests",
        "queues",
    }
    assert answer["loads"][0]["max_running_requests"] == target.capacity
    assert set(answer["aggregate"]) == {
        "total_running_reqs",
        "total_waiting_reqs",
        "total_reqs",
        "total_used_tokens",
        "total_tokens",
        "avg_token_usage",
        "avg_throughput",
        "avg_utilization",
    }
    core = (await get(target, "/v1/loads?include=core")).json()["loads"][0]
    assert "queues" not in core
    assert "num_running_reqs" in core


@behaviour
async def metrics_have_the_names_and_labels_of_this_version(target: Target) -> None:
    await post(target, COMPLETION, target.body(COMPLETION, 4))
    text = (await get(target, "/metrics")).text
    scheduler = {"engine_type", "model_name", "moe_ep_rank", "pp_rank", "tp_rank"}
    front = {"engine_type", "model_name"}
    wanted = {
        "num_running_reqs": scheduler,
        "num_queue_reqs": scheduler,
        "token_usage": scheduler,
        "gen_throughput": scheduler,
        "max_total_num_tokens": scheduler,
        "spec_accept_length": scheduler,
        "num_requests_total": front,
        "prompt_tokens_total": front,
        "generation_tokens_total": front,
        "time_to_first_token_seconds_count": front,
        "inter_token_latency_seconds_count": front,
        "e2e_request_latency_seconds_count": front,
        "e2e_request_latency_seconds_bucket": front | {"le"},
    }
    for name, labels in wanted.items():
        found = re.search(rf"^sglang:{name}{{([^}}]*)}} ", text, re.MULTILINE)
        assert found, name
        assert set(re.findall(r'(\w+)="', found[1])) == labels, name


@behaviour
async def it_says_which_model_it_serves(target: Target) -> None:
    models = (await get(target, "/v1/models")).json()
    (card,) = models["data"]
    assert set(card) == {
        "id",
        "object",
        "created",
        "owned_by",
        "root",
        "parent",
        "max_model_len",
    }
    assert card["max_model_len"] == target.context_tokens
    for path in ("/get_model_info", "/model_info"):
        info = (await get(target, path)).json()
        assert info["is_generation"] is True
        assert {"model_path", "tokenizer_path", "weight_version", "architectures"} <= set(info)
    for path in ("/get_server_info", "/server_info"):
        info = (await get(target, path)).json()
        assert info["version"] == "0.5.12.post1"
        assert {"max_running_requests", "served_model_name", "dtype", "context_length"} <= set(info)
        assert {"speculative_algorithm", "max_total_num_tokens", "internal_states"} <= set(info)
        (state,) = info["internal_states"]
        assert state["effective_max_running_requests_per_dp"] == target.capacity


@behaviour
async def health_is_an_empty_200(target: Target) -> None:
    for path in ("/health", "/health_generate"):
        response = await get(target, path)
        assert (response.status_code, response.content) == (200, b"")
        assert "content-type" not in response.headers
