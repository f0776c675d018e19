"""Rows as the load client would write them, of engine models in virtual time: exact and quick."""

import heapq
import random
from collections.abc import Sequence

from loadtest.engine_batch import Sequence as EngineSequence
from loadtest.engine_model import Engine, Gpu
from loadtest.engine_params import Acceptance, DecodeMode, EngineParams
from loadtest.pacing import ClosedLoop, Ramp
from loadtest.record import Ending, RequestRow
from loadtest.workload import Workload

LOOK_S = 0.02


def line_engine(
    base_ms: float,
    slope_ms: float,
    *,
    accept: float | None = None,
    prefill_token_s: float = 0.0,
) -> EngineParams:
    """An engine of a known curve: base + slope * n milliseconds a token at n requests."""
    length = accept or 1.0
    points = tuple((n, (base_ms + slope_ms * n) * length / 1e3) for n in (1, 256))
    return EngineParams(
        name="line",
        source="a test",
        decode=DecodeMode(points, Acceptance(accept, longest=4) if accept else None),
        prefill_pass_s=0.0,
        prefill_token_s=prefill_token_s,
        kv_tokens=500_000,
    )


class _Client:
    """A closed loop on one engine."""

    def __init__(self, params: EngineParams, gpu: Gpu, ramp: Ramp, workload: Workload) -> None:
        self.engine = Engine(params, gpu)
        self.rows: list[RequestRow] = []
        self._pacer = ClosedLoop(ramp, duration_s=ramp.points[-1][0])
        self._workload = workload
        self._last: dict[int, float] = {}
        self._rng = random.Random(1)
        self.busy = False
        self.in_flight = 0

    def start_due(self, now: float) -> None:
        for at in self._pacer.due(now, len(self.rows), self.in_flight):
            ask = self._workload.ask(len(self.rows))
            row = RequestRow(ask.index, at, at, ask.output_tokens)
            row.prompt_tokens, row.status, row.server = ask.prompt_tokens, 200, "one"
            self.rows.append(row)
            self.in_flight += 1
            self.engine.submit(EngineSequence(ask.prompt_tokens, ask.output_tokens, key=row))

    def end(self, now: float) -> None:
        step = self.engine.end(self._rng)
        for sequence, _ in step.emitted:
            row = sequence.key
            assert isinstance(row, RequestRow)
            if row.first_s is None:
                row.first_s = now
            else:
                row.gaps_s.append(now - self._last[row.index])
            self._last[row.index] = row.last_s = now
            row.events += 1
        for sequence in step.ended:
            row = sequence.key
            assert isinstance(row, RequestRow)
            row.end_s, row.tokens, row.ending = now, sequence.output_tokens, Ending.OK
            self.in_flight -= 1


def simulate(
    engines: Sequence[EngineParams], ramp: Ramp, workload: Workload, *, shared: bool = False
) -> list[list[RequestRow]]:
    """Run the same closed loop on each engine at once; return each one's rows."""
    gpu = Gpu()
    clients = [_Client(p, gpu if shared else Gpu(), ramp, workload) for p in engines]
    total_s = ramp.points[-1][0]
    events: list[tuple[float, int]] = [(0.0, -1)]
    while events:
        now, who = heapq.heappop(events)
        if now > total_s:
            break
        if who < 0:
            heapq.heappush(events, (now + LOOK_S, -1))
        else:
            clients[who].busy = False
            clients[who].end(now)
        for place, client in enumerate(clients):
            client.start_due(now)
            if not client.busy and (duration_s := client.engine.begin()) is not None:
                client.busy = True
                heapq.heappush(events, (now + duration_s, place))
    for client in clients:
        for row in client.rows:
            row.ending = row.ending or Ending.CUT
    return [client.rows for client in clients]
