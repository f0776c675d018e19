"""What goes through, goes through unchanged."""

import asyncio
import gzip
import json

import pytest

from router.dataplane.peek import PARSE_BYTES_MAX
from tests.integration.rig import CHAT, DONE, PLAIN, Call, Engine, answer, event, request, running

pytestmark = pytest.mark.anyio


async def test_a_plain_request_and_its_answer_keep_every_byte() -> None:
    body = (
        b'{ "messages" : [{"role":"user","content":"h\\u00e9"}],  "odd_field": {"x": [1, 2.50]} }'
    )
    reply = b'{"choices": [],\n "unknown": 1.0}'

    async def script(call: Call) -> None:
        await call.reply(reply, 200, "x-engine: yes", "date: today")

    async with running() as rig:
        rig.spec.script = script
        response = await rig.http.post(f"{CHAT}?a=1&b=%20", content=body)
        call = rig.spec.calls[0]
        rid = call.json["rid"]
        assert call.body == b'{"rid":"%s",' % rid.encode() + body[1:]
        assert len(rid) == 32
        assert (call.method, call.target) == ("POST", f"{CHAT}?a=1&b=%20")
        assert response.content == reply
        assert response.headers["x-engine"] == "yes"
        assert response.headers["date"] == "today"
        assert response.headers["content-length"] == str(len(reply))
        assert response.headers["x-crossover-server"] == "spec"
        assert response.headers["x-crossover-reason"] == "fixed"
        record = await rig.record()
        assert (record.outcome, record.status, record.server) == ("ok", 200, "spec")
        await rig.settled()


async def test_a_stream_keeps_every_byte() -> None:
    events = [event("a"), event("漢字"), DONE]

    async def script(call: Call) -> None:
        await call.stream(*events)

    async with running() as rig:
        rig.spec.script = script
        body = json.dumps({"messages": [], "stream": True}).encode()
        response = await rig.http.post(CHAT, content=body)
        assert response.content == b"".join(events)
        record = await rig.record()
        assert (record.outcome, record.streaming) == ("ok", True)
        assert record.ttft_s is not None
        assert len(rig.observer.gaps) == 2
        await rig.settled()


async def test_utf8_cut_between_chunks_arrives_whole() -> None:
    stream = event("漢字🙂") + DONE
    pieces = [stream[i : i + 1] for i in range(len(stream))]

    async def script(call: Call) -> None:
        await call.stream(*pieces)

    async with running() as rig:
        rig.spec.script = script
        response = await rig.http.post(CHAT, content=PLAIN)
        assert response.content == stream
        assert (await rig.record()).outcome == "ok"


@pytest.mark.parametrize(
    "body", [b"{not json", b'["a list"]', b"", b'"text"', b'{"messages": "\xff"}']
)
async def test_a_body_that_is_no_json_object_is_the_engines_to_judge(body: bytes) -> None:
    async def script(call: Call) -> None:
        await call.reply(b'{"object":"error"}', 400)

    async with running() as rig:
        rig.spec.script = script
        response = await rig.http.post(CHAT, content=body)
        assert rig.spec.calls[0].body == body
        assert (response.status_code, response.content) == (400, b'{"object":"error"}')
        assert "x-crossover-error" not in response.headers
        assert (await rig.record()).outcome == "rejected"


async def test_a_body_too_large_to_be_read_is_relayed_as_it_is() -> None:
    body = b'{"messages": "' + b"a" * PARSE_BYTES_MAX + b'"}'
    async with running(body_bytes=2 * PARSE_BYTES_MAX) as rig:
        assert (await rig.http.post(CHAT, content=body)).status_code == 200
        assert rig.spec.calls[0].body == body


async def test_a_chunked_request_body_arrives_with_its_length() -> None:
    async with running() as rig:
        chunks = b"".join(
            b"%x\r\n%s\r\n" % (len(part), part) for part in (PLAIN[:9], PLAIN[9:], b"")
        )
        head = f"POST {CHAT} HTTP/1.1\r\nhost: router\r\ntransfer-encoding: chunked\r\n\r\n"
        reader, writer = await rig.raw(head.encode() + chunks)
        assert b" 200 " in await reader.readline()
        call = rig.spec.calls[0]
        assert call.json["messages"] == json.loads(PLAIN)["messages"]
        assert call.header("content-length") == str(len(call.body))
        assert call.header("transfer-encoding") is None
        writer.close()


async def test_a_client_that_expects_100_continue_gets_it() -> None:
    async with running() as rig:
        whole = request("POST", CHAT, PLAIN, "expect: 100-continue")
        head, _, body = whole.partition(b"\r\n\r\n")
        reader, writer = await rig.raw(head + b"\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert b" 200 " in await reader.readline()
        assert rig.spec.calls[0].header("expect") is None
        writer.close()


async def test_headers_of_one_hop_stop_there_and_all_others_pass() -> None:
    async def script(call: Call) -> None:
        await call.reply(
            b"{}", 200, "connection: close, x-private", "x-private: 1", "keep-alive: timeout=5",
            "set-cookie: a=1", "set-cookie: b=2", "x-crossover-error: forged",
        )  # fmt: skip

    async with running() as rig:
        rig.spec.script = script
        sent = [
            "authorization: Bearer abc", "connection: keep-alive, x-secret-hop", "x-secret-hop: 1",
            "te: trailers", "proxy-authorization: x", "accept-encoding: gzip, br",
            "traceparent: 00-1", "x-data-parallel-rank: 3", "x-dup: 1", "x-dup: 2",
        ]  # fmt: skip
        reader, writer = await rig.post(CHAT, PLAIN, *sent)
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        call = rig.spec.calls[0]
        names = [name for name, _ in call.headers]
        assert call.header("authorization") == "Bearer abc"
        assert call.header("traceparent") == "00-1"
        assert call.header("x-data-parallel-rank") == "3"
        assert [value for name, value in call.headers if name == "x-dup"] == ["1", "2"]
        assert call.header("accept-encoding") == "identity"
        assert names.count("accept-encoding") == names.count("host") == 1
        assert call.header("host") == rig.spec.url.removeprefix("http://")
        assert not {"connection", "x-secret-hop", "te", "proxy-authorization"} & set(names)
        assert [line for line in head if line.startswith("set-cookie")] == [
            "set-cookie: a=1",
            "set-cookie: b=2",
        ]
        assert not any(
            line.startswith(("x-private", "keep-alive", "connection", "x-crossover-error"))
            for line in head
        )
        writer.close()


async def test_a_compressed_answer_keeps_its_headers_and_bytes() -> None:
    async def script(call: Call) -> None:
        await call.reply(b"\x1f\x8bnot really", 200, "content-encoding: gzip")

    async with running() as rig:
        rig.spec.script = script
        reader, writer = await rig.post(CHAT, PLAIN, "accept-encoding: gzip")
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert b"content-encoding: gzip" in head
        assert b"content-length: 12" in head
        assert await reader.readexactly(12) == b"\x1f\x8bnot really"
        writer.close()


async def test_a_compressed_stream_passes_as_it_is() -> None:
    packed = gzip.compress(event("a") + DONE)

    async def script(call: Call) -> None:
        await call.stream_head("content-encoding: gzip")
        await call.chunk(packed)
        await call.end()

    async with running() as rig:
        rig.spec.script = script
        response = await rig.http.post(CHAT, content=PLAIN)
        assert response.content == event("a") + DONE
        assert (await rig.record()).outcome == "ok"


async def test_the_request_id_is_echoed_and_passed_on() -> None:
    async with running() as rig:
        response = await rig.http.post(CHAT, content=PLAIN, headers={"x-request-id": "mine-1"})
        assert response.headers["x-request-id"] == "mine-1"
        assert rig.spec.calls[0].header("x-request-id") == "mine-1"
        assert (await rig.record()).request_id == "mine-1"


@pytest.mark.parametrize("given", ["a b", "x" * 129, "caf\xe9"])
async def test_a_request_id_that_could_do_harm_is_replaced(given: str) -> None:
    async with running() as rig:
        headers = {"x-request-id": given.encode("latin-1")}
        response = await rig.http.post(CHAT, content=PLAIN, headers=headers)
        assert len(response.headers["x-request-id"]) == 32
        assert rig.spec.calls[0].header("x-request-id") == response.headers["x-request-id"]


async def test_get_and_head_are_relayed_without_a_body() -> None:
    async def script(call: Call) -> None:
        if call.method == "HEAD":
            await call.head(200, "content-length: 8")
        else:
            await call.reply(b'{"a": 1}')

    async with running() as rig:
        rig.spec.script = script
        assert (await rig.http.get("/v1/models")).content == b'{"a": 1}'
        response = await rig.http.head("/v1/models")
        assert (response.content, response.headers["content-length"]) == (b"", "8")
        assert (await rig.http.get("/v1/models")).content == b'{"a": 1}'
        assert [call.header("content-length") for call in rig.spec.calls] == [None, None, None]
        assert (await rig.record(3)).endpoint == "/v1/models"
        await rig.settled()


async def test_a_model_whose_name_has_a_slash_is_found() -> None:
    async with running() as rig:
        await rig.http.get("/v1/models/meta-llama%2FLlama-3")
        assert rig.spec.calls[0].target == "/v1/models/meta-llama%2FLlama-3"
        assert (await rig.record()).endpoint == "/v1/models/{model}"


async def test_answers_without_a_length_end_with_their_connection() -> None:
    async def script(call: Call) -> None:
        await call.head(200, "content-type: application/json")
        await call.write(b'{"a":')
        await call.write(b" 1}")
        call.writer.close()
        call.closed = True

    async with running() as rig:
        rig.spec.script = script
        assert (await rig.http.post(CHAT, content=PLAIN)).content == b'{"a": 1}'
        assert (await rig.record()).outcome == "ok"


async def test_informational_responses_are_not_taken_for_the_answer() -> None:
    async def script(call: Call) -> None:
        await call.write(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nlink: x\r\n\r\n")
        await call.reply(b"{}", 201)

    async with running() as rig:
        rig.spec.script = script
        response = await rig.http.post(CHAT, content=PLAIN)
        assert (response.status_code, response.content) == (201, b"{}")
        assert "link" not in response.headers


@pytest.mark.parametrize("status", [204, 304])
async def test_a_length_without_a_body_breaks_nothing(status: int) -> None:
    async def bodiless(call: Call) -> None:
        await call.head(status, "content-length: 5")

    async with running() as rig:
        rig.spec.script = bodiless
        assert (await rig.http.get("/v1/models")).status_code == status
        assert (await rig.record()).outcome == "ok"
        rig.spec.script = answer
        assert (await rig.http.get("/v1/models")).content == b'{"ok": true}'
        assert rig.spec.connections == 1


async def test_a_base_path_of_the_server_is_kept() -> None:
    engine = Engine()
    engine.url += "/deep/down"
    async with running(engines={"spec": engine}) as rig:
        await rig.http.post(CHAT, content=PLAIN)
        assert engine.calls[0].target == "/deep/down" + CHAT


async def test_connections_are_reused_youngest_first() -> None:
    async with running() as rig:
        for _ in range(5):
            await rig.http.post(CHAT, content=PLAIN)
        assert rig.spec.connections == 1
        await asyncio.gather(*(rig.http.post(CHAT, content=PLAIN) for _ in range(4)))
        burst = rig.spec.connections
        assert rig.pools["spec"].idle_connections == burst
        for _ in range(5):
            await rig.http.post(CHAT, content=PLAIN)
        assert rig.spec.connections == burst
        assert len({call.connection for call in rig.spec.calls[-5:]}) == 1


async def test_what_a_model_says_of_usage_is_counted() -> None:
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":7}}\n\n'

    async def script(call: Call) -> None:
        await call.stream(event("a"), usage, DONE)

    async with running() as rig:
        rig.spec.script = script
        await rig.http.post(CHAT, content=PLAIN)
        record = await rig.record()
        assert (record.output_tokens, record.tokens_exact) == (7, True)


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (404, "rejected"),
        (429, "upstream_overload"),
        (500, "upstream_error"),
        (503, "upstream_overload"),
    ],
)
async def test_an_engines_error_passes_and_is_not_taken_for_a_fault_of_the_wire(
    status: int, outcome: str
) -> None:
    async def script(call: Call) -> None:
        await call.reply(b'{"object":"error"}', status)

    async with running(engines={"spec": Engine(script)}) as rig:
        for _ in range(3):
            response = await rig.http.post(CHAT, content=PLAIN)
            assert (response.status_code, response.content) == (status, b'{"object":"error"}')
        assert rig.health["spec"].up
        assert (await rig.record(3)).outcome == outcome
