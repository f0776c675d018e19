"""What the engines are asked in the tests: one case per feature that meets a switch of the mode."""

import random
from collections.abc import Mapping
from dataclasses import replace

from tests.engine.harness.scenario import Case, Request

ENDLESS: Mapping[str, object] = {"ignore_eos": True}
FIRST_WORD = 2  # token ids below are special


def prompt(length: int, seed: int) -> list[int]:
    """Return random tokens, the same for the same arguments."""
    choose = random.Random(seed * 1000 + length)
    return [choose.randrange(FIRST_WORD, 128) for _ in range(length)]


def _staggered() -> Case:
    """Arrivals while others decode, a prompt longer than a prefill chunk, departures one by one."""
    shape = ((4, 30, 0), (90, 12, 0), (11, 24, 2), (30, 17, 5), (3, 40, 9), (64, 20, 14))
    return Case(
        "staggered",
        [
            Request(prompt(length, seed), max_new_tokens=new, at=at, sampling=ENDLESS)
            for seed, (length, new, at) in enumerate(shape)
        ],
    )


def _burst() -> Case:
    """From one request to ten and back: crosses a threshold twice."""
    requests = [Request(prompt(9, 50), max_new_tokens=60, sampling=ENDLESS)]
    requests += [
        Request(prompt(5 + index, 51), max_new_tokens=8 + 2 * index, at=6 + index, sampling=ENDLESS)
        for index in range(9)
    ]
    return Case("burst", requests)


def _stops() -> Case:
    sampling = (
        {"stop_token_ids": [97, 61]},
        {"stop": ["an", "8"]},
        {"stop": "x", "no_stop_trim": True},
        {"stop_regex": "[0-9]"},
        {},
    )
    return Case(
        "stops",
        [
            Request(prompt(8, 20 + i), max_new_tokens=48, at=i, sampling=s)
            for i, s in enumerate(sampling)
        ],
    )


def _aborts() -> Case:
    """Aborted while waiting, during prefill, at four consecutive steps, and next to requests
    that stay.
    """
    requests = [
        Request(prompt(6, 30 + index), max_new_tokens=60, abort_at=8 + index, sampling=ENDLESS)
        for index in range(4)
    ]
    requests.append(
        Request(prompt(150, 35), max_new_tokens=20, at=9, abort_at=10, sampling=ENDLESS)
    )
    requests.append(
        Request(prompt(12, 36), max_new_tokens=20, at=12, abort_at=12, sampling=ENDLESS)
    )
    requests += [
        Request(prompt(7, 40 + i), max_new_tokens=25, at=i, sampling=ENDLESS) for i in range(2)
    ]
    return Case("aborts", requests)


def _chunked() -> Case:
    """Long prompts come in chunks while short ones decode."""
    requests = [Request(prompt(5, 60 + i), max_new_tokens=30, sampling=ENDLESS) for i in range(2)]
    requests += [
        Request(prompt(150 + 31 * i, 62), max_new_tokens=10, at=4 + 3 * i, sampling=ENDLESS)
        for i in range(3)
    ]
    return Case("chunked", requests)


def _turns() -> Case:
    """Three turns of two conversations: the next prompt extends what is cached."""
    requests = [Request(prompt(20, 70 + i), max_new_tokens=24, sampling=ENDLESS) for i in range(2)]
    for turn in range(2):
        requests += [
            Request(
                prompt(6, 72 + turn),
                max_new_tokens=24,
                follows=2 * turn + i,
                at=-1,
                sampling=ENDLESS,
            )
            for i in range(2)
        ]
    return Case("turns", requests)


def _logprobs() -> Case:
    return Case(
        "logprobs",
        [
            Request(
                prompt(10, 80 + i),
                max_new_tokens=20,
                at=2 * i,
                top_logprobs=2 * i,
                sampling=ENDLESS,
            )
            for i in range(3)
        ],
    )


def _grammar() -> Case:
    schema = (
        '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 6}, '
        '"size": {"type": "integer"}}, "required": ["name", "size"], "additionalProperties": false}'
    )
    sampling: tuple[Mapping[str, object], ...] = (
        {"json_schema": schema},
        {"regex": "(ab|cd){6}[0-9]{4}"},
        ENDLESS,
    )
    return Case(
        "grammar",
        [Request(prompt(9, 90 + i), max_new_tokens=48, sampling=s) for i, s in enumerate(sampling)],
    )


def _penalties() -> Case:
    sampling = (
        {"frequency_penalty": 0.8},
        {"presence_penalty": 1.1},
        {"repetition_penalty": 1.4},
        {"min_new_tokens": 8},
    )
    return Case(
        "penalties",
        [
            Request(prompt(8, 100 + i), max_new_tokens=24, at=i, sampling={**s, **ENDLESS})
            for i, s in enumerate(sampling)
        ],
    )


def _parallel() -> Case:
    """n = 4: the same prompt several times at once, as the tokenizer manager sends it."""
    return Case(
        "parallel",
        [Request(prompt(40, 110), max_new_tokens=20, sampling=ENDLESS) for _ in range(4)],
    )


LONG = Case(
    "long", [Request(prompt(12, 200 + i), max_new_tokens=120, sampling=ENDLESS) for i in range(8)]
)
"""Enough steps to compare accept lengths."""

LONG_LOGPROBS = Case(
    "long-logprobs", [replace(request, top_logprobs=0) for request in LONG.requests]
)
"""The same, verified by stock."""

GAPS = Case(
    "gaps", [Request(prompt(12, 300 + i), max_new_tokens=320, sampling=ENDLESS) for i in range(8)]
)
"""Room for gaps of 64 OFF steps and what follows them."""

CROWD = Case(
    "crowd",
    [
        Request(prompt(10, 500 + i), max_new_tokens=60, at=i // 3, sampling=ENDLESS)
        for i in range(6)
    ],
)
"""More than a squeezed engine holds: requests are retracted and come back."""

SQUEEZED: Mapping[str, object] = {
    "max_total_tokens": 208,
    "schedule_conservativeness": 0.1,  # admits what the pool cannot hold to its end
}

RESUMED = Case(
    "resumed",
    [
        Request(prompt(20, 600), max_new_tokens=40, sampling=ENDLESS),
        Request(prompt(20, 601), max_new_tokens=40, sampling=ENDLESS),
        Request(prompt(6, 602), max_new_tokens=60, at=-1, follows=0, sampling=ENDLESS),
    ],
)
"""Two conversations side by side, then a second turn of the first one alone."""

LONG_GAP = Case(
    "long-gap",
    [
        Request(prompt(12, 610 + i), max_new_tokens=360 if i else 258, sampling=ENDLESS)
        for i in range(9)
    ],
)
"""Nine requests for 256 steps after the first, then eight of them."""

ARRIVALS = Case(
    "arrivals",
    [
        Request(prompt(9 + i % 5, 620 + i), max_new_tokens=8, at=2 * i, sampling=ENDLESS)
        for i in range(40)
    ],
)
"""One new request after the other, each of a few steps."""

SAMPLED = Case(
    "sampled",
    [
        Request(prompt(8, 400), 3, sampling={**ENDLESS, "temperature": 2.5, "top_k": 8})
        for _ in range(320)
    ],
)
"""The same question many times, with temperature: a sample of the distribution of answers."""

DRAWN = Case(
    "drawn",
    [
        Request(prompt(8, 730 + i), 20, sampling={**ENDLESS, "temperature": i / 2, "top_p": 0.9})
        for i in range(6)
    ],
)
"""Each with a temperature of its own, the first one greedy."""

BIASED = Case(
    "biased",
    [
        Request(prompt(7, 700), sampling={**ENDLESS, "logit_bias": {"9": 2.5, "70": 4.0}}),
        Request(prompt(7, 701), 12, sampling=ENDLESS),
    ],
)

FORBIDDEN = Case(
    "forbidden",
    [Request(prompt(7, 710 + i), forbidden=[*range(2, 60)], sampling=ENDLESS) for i in range(2)],
)

SHOWN = Case(
    "shown",
    [
        Request(prompt(9, 720 + i), 10 + 4 * i, at=i, hidden_states=i != 1, sampling=ENDLESS)
        for i in range(3)
    ],
)
"""Two requests that want their hidden states and one that does not."""

FEATURES: Mapping[str, Case] = {
    case.name: case
    for case in (
        _staggered(),
        _burst(),
        _stops(),
        _aborts(),
        _chunked(),
        _turns(),
        _logprobs(),
        _grammar(),
        _penalties(),
        _parallel(),
    )
}
