"""When a reply writes what, seen from the channel that it writes to."""

import json
from collections import deque
from collections.abc import Callable

import orjson
import pytest

from loadtest.engine_batch import State
from loadtest.sim_driver import SLIP_S, Lag
from loadtest.sim_metrics import Histogram
from loadtest.sim_replies import Reply
from loadtest.sim_requests import Api, parse_call
from loadtest.sim_streams import make_reply


class Tap:
    """A channel that keeps what it is given."""

    def __init__(self) -> None:
        self.writable = True
        self.written: list[str] = []
        self.later: deque[Callable[[], None]] = deque()

    def open_stream(self) -> None:
        self.written.append("head")

    def event(self, data: bytes) -> None:
        self.written.append(data.decode())

    def close_stream(self) -> None:
        self.written.append("end")

    def json(self, status: int, body: bytes) -> None:
        self.written.append(f"{status} {body.decode()}")

    def soon(self, callback: Callable[[], None]) -> None:
        self.later.append(callback)

    def turn(self) -> None:
        """Let the event loop go round."""
        while self.later:
            self.later.popleft()()

    @property
    def texts(self) -> list[str]:
        events = [json.loads(data[6:]) for data in self.written if data.startswith("data: {")]
        return [event["choices"][0]["text"] for event in events if event["choices"]]


@pytest.fixture(name="tap")
def _tap() -> Tap:
    return Tap()


def reply_to(tap: Tap, api: Api = Api.COMPLETION, **body: object) -> Reply:
    raw = orjson.dumps({"prompt": "x", "text": "x", "stream": True, "max_tokens": 10, **body})
    return make_reply(parse_call(api, raw, "application/json", 1_000), tap, now=0.0)


def generate(reply: Reply, tokens: int, state: State = State.RUNNING, index: int = 0) -> None:
    output = reply.outputs[index]
    output.sequence.output_tokens += tokens
    output.sequence.state = state
    reply.progress(output)


def test_nothing_is_written_before_the_first_token(tap: Tap) -> None:
    reply_to(tap)
    tap.turn()
    assert tap.written == []


def test_the_first_event_is_not_written_in_one_turn_with_the_head(tap: Tap) -> None:
    reply = reply_to(tap)
    generate(reply, 1)
    assert tap.written == ["head"]
    tap.turn()
    assert len(tap.written) == 2


def test_the_head_of_generate_does_not_wait_for_a_token(tap: Tap) -> None:
    reply_to(tap, Api.GENERATE)
    assert tap.written == ["head"]


def test_each_step_is_one_event(tap: Tap) -> None:
    reply = reply_to(tap)
    generate(reply, 1)
    tap.turn()
    generate(reply, 3)
    generate(reply, 2)
    assert len(tap.texts) == 3


def test_what_a_slow_reader_missed_comes_in_one_event(tap: Tap) -> None:
    fast, slow = Tap(), tap
    for each in (fast, slow):
        reply = reply_to(each)
        generate(reply, 1)
        each.turn()
        each.writable = each is fast
        for _ in range(4):
            generate(reply, 2)
        each.writable = True
        generate(reply, 1, State.FINISHED)
        reply.resume()
    assert len(fast.texts) == 6
    assert len(slow.texts) == 2
    assert "".join(fast.texts) == "".join(slow.texts)
    assert fast.written[-2:] == slow.written[-2:] == ["data: [DONE]\n\n", "end"]


def test_a_stream_that_ends_while_its_reader_is_slow_ends_when_it_resumes(tap: Tap) -> None:
    reply = reply_to(tap)
    generate(reply, 1)
    tap.turn()
    tap.writable = False
    generate(reply, 9, State.FINISHED)
    assert tap.written[-1] != "end"
    tap.writable = True
    reply.resume()
    reply.resume()
    assert tap.written.count("end") == 1


def test_a_stream_of_several_choices_ends_with_the_last(tap: Tap) -> None:
    reply = reply_to(tap, n=2)
    generate(reply, 10, State.FINISHED, index=0)
    tap.turn()
    assert "end" not in tap.written
    generate(reply, 10, State.FINISHED, index=1)
    assert tap.written[-1] == "end"


def test_a_whole_reply_is_written_once_when_all_has_come(tap: Tap) -> None:
    reply = reply_to(tap, n=2, stream=False)
    generate(reply, 10, State.FINISHED, index=0)
    assert tap.written == []
    generate(reply, 10, State.FINISHED, index=1)
    assert len(tap.written) == 1
    assert tap.written[0].startswith("200 ")


def test_a_reply_that_ends_itself_says_stop(tap: Tap) -> None:
    messages = [{"role": "user", "content": "x"}]
    reply = reply_to(tap, Api.CHAT, messages=messages, max_tokens=None, stream=False)
    generate(reply, 5, State.FINISHED)
    choice = json.loads(tap.written[0].removeprefix("200 "))["choices"][0]
    assert choice["finish_reason"] == "stop"


def test_lateness_is_counted_and_a_schedule_that_cannot_be_kept_slips() -> None:
    lag = Lag()
    assert not lag.note(SLIP_S / 2)
    assert lag.slipped_s == 0
    assert lag.note(SLIP_S * 2)
    assert lag.slipped_s == pytest.approx(SLIP_S * 2)
    assert lag.max_s == pytest.approx(SLIP_S * 2)
    assert lag.mean_s == pytest.approx(SLIP_S * 1.25)


def test_a_histogram_counts_up_to_each_bound() -> None:
    histogram = Histogram((1, 2))
    histogram.observe(1, times=2)
    histogram.observe(5)
    assert list(histogram.lines("h", 'a="b"')) == [
        'h_bucket{le="1",a="b"} 2.0',
        'h_bucket{le="2",a="b"} 2.0',
        'h_bucket{le="+Inf",a="b"} 3.0',
        'h_count{a="b"} 3.0',
        'h_sum{a="b"} 7.0',
    ]
