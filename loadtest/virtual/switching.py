"""An engine model with the plugin: it stops speculating above a threshold, by the plugin's rule."""

from loadtest.engine_model import Engine, Gpu
from loadtest.engine_params import DecodeMode, EngineParams
from router.core.types import SwitchReport
from sglang_patch.rule import BatchView, Mode, ThresholdRule

# The plugin's defaults.
ENABLE_SHARE = 0.8
DWELL_STEPS = 16


class SwitchingEngine(Engine):
    """Speculates up to `threshold` running requests, and again at or below 0.8 of that."""

    def __init__(
        self, params: EngineParams, gpu: Gpu, threshold: int, *, max_running_requests: int
    ) -> None:
        if params.off is None:
            raise ValueError(f"no steps without speculation are known of {params.name}")
        super().__init__(params, gpu, max_running_requests=max_running_requests)
        self._enable_at = int(ENABLE_SHARE * threshold)
        self._rule = ThresholdRule(threshold, self._enable_at, DWELL_STEPS)
        self._steps_by_mode = dict.fromkeys(Mode, 0)
        self._chosen = Mode.ON

    def begin(self, horizon_s: float = 0.0) -> float | None:  # noqa: ARG002 - the rule sees each step
        """Start the next step, one at a time."""
        return super().begin()

    def report(self) -> SwitchReport:
        """Return what the plugin would say in /v1/loads."""
        steps = self._steps_by_mode
        total = sum(steps.values())
        return SwitchReport(
            state="active" if total else "armed",
            mode=self._chosen.value,
            threshold=self._rule.disable_above,
            enable_threshold=self._enable_at,
            off_share=steps[Mode.OFF] / total if total else None,
        )

    def _decide(self) -> DecodeMode:
        on, off = self.params.decode, self.params.off
        assert off is not None
        running = len(self.running)
        view = BatchView(
            step=self.totals.decode_steps,
            running=running,
            kv_free_tokens=self.params.kv_tokens - self.kv_used_tokens,
            kv_on_tokens=running * on.step_slots,
        )
        self._chosen = self._rule.decide(view)
        self._steps_by_mode[self._chosen] += 1
        return on if self._chosen is Mode.ON else off
