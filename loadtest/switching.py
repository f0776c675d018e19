"""An engine model with the plugin, whose own switch decides each step and counts it."""

from loadtest.engine_model import Engine, Gpu, Step, Work
from loadtest.engine_params import DecodeMode, EngineParams, Rng
from router.core.types import SwitchReport
from sglang_patch.config import DISABLE, read_config
from sglang_patch.rule import Mode
from sglang_patch.switch import Switch


class SwitchingEngine(Engine):
    """Speculates up to `threshold` running requests, and else as the plugin does by default.

    ValueError if no steps without speculation are known of the model.
    """

    def __init__(
        self,
        params: EngineParams,
        gpu: Gpu,
        threshold: int,
        *,
        max_running_requests: int | None = None,
        max_queued_requests: int | None = None,
    ) -> None:
        if params.off is None:
            raise ValueError(f"no steps without speculation are known of {params.name}")
        super().__init__(
            params,
            gpu,
            max_running_requests=max_running_requests,
            max_queued_requests=max_queued_requests,
        )
        config = read_config({DISABLE.variable: str(threshold)})
        assert config is not None
        self._busy_s = 0.0
        self._steps = 0
        self.switch = Switch(config, clock=lambda: self._busy_s)
        self.switch.arm()

    def begin(self, horizon_s: float = 0.0) -> float | None:  # noqa: ARG002 - the rule sees each step
        """Start the next step, one at a time."""
        return super().begin()

    def end(self, rng: Rng, *, each: bool = True) -> Step:
        """Apply the step that `begin` started, and count what it yielded."""
        tokens, running = self.totals.decoded_tokens, len(self.running)
        step = super().end(rng, each=each)
        self._busy_s += step.duration_s
        self._steps += 1
        if step.work is Work.DECODE:
            tokens = self.totals.decoded_tokens - tokens
            self.switch.finished(self.switch.mode, running, tokens, graph_missed=False)
        return step

    def report(self) -> SwitchReport:
        """Return what a router reads of the plugin."""
        switch = self.switch
        assert switch.config.disable_above is not None
        steps = switch.telemetry.steps
        off_steps = switch.telemetry.modes[Mode.OFF].steps
        return SwitchReport(
            state=switch.state.value,
            mode=switch.mode.value,
            threshold=switch.config.disable_above,
            enable_threshold=switch.config.enable_at,
            off_share=off_steps / steps if steps else None,
        )

    def _decide(self) -> DecodeMode:
        on, off = self.params.decode, self.params.off
        assert off is not None
        running = len(self.running)
        mode = self.switch.decide(
            running,
            kv_free_tokens=self.params.kv_tokens - self.kv_used_tokens,
            kv_on_tokens=running * on.step_slots,
            forward=self._steps,
        )
        self.switch.seen_in_worker()
        return on if mode is Mode.ON else off


def make_engine(
    params: EngineParams,
    gpu: Gpu,
    threshold: int | None = None,
    *,
    max_running_requests: int | None = None,
    max_queued_requests: int | None = None,
) -> Engine:
    """Return an idle engine: with the plugin if it has a threshold, else as it comes."""
    limits = {
        "max_running_requests": max_running_requests,
        "max_queued_requests": max_queued_requests,
    }
    if threshold is None:
        return Engine(params, gpu, **limits)
    return SwitchingEngine(params, gpu, threshold, **limits)
