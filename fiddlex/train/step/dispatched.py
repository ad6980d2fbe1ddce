"""The train steps that the host has dispatched to the devices, and the record that each makes once it is done."""

import math
import time
from typing import NamedTuple

import jax
import numpy as np

from fiddlex.config import TrainConfig
from fiddlex.costs.utilisation import Throughput
from fiddlex.errors import NonFiniteError, SpikeError
from fiddlex.train.record import Record
from fiddlex.train.step.stopwatch import Activity, Stopwatch
from fiddlex.train.step.train_step import Metrics

# Metrics that a record needs; the last three are there with losses of layers, model.dtype=float16, train.spike_bound.
_READ = ("loss", "grad_norm", "learning_rate", "weights_finite", "layer_loss", "loss_scale", "spike")


class Dispatched(NamedTuple):
    """A step that the host has dispatched to the devices."""

    step: int  # counted from 1
    metrics: Metrics  # on the devices, see `fiddlex.train.step.train_step.make_train_step`
    time_s: float  # when the host dispatched the step, by the monotonic clock

    def is_done(self) -> bool:
        """Whether the devices of this process have finished the step."""
        return self.metrics["loss"].is_ready()

    def record(self, previous_s: float, throughput: Throughput, config: TrainConfig) -> tuple[Record, float]:
        """Waits for the step; returns its record and when it was done. Errors are those of `Trainer.record`.

        Both times are by the monotonic clock; `previous_s` is when the step before was done, −inf for the first step.
        """
        values = jax.device_get({name: self.metrics[name] for name in _READ if name in self.metrics})
        loss, grad_norm = float(values["loss"]), float(values["grad_norm"])
        now = time.monotonic()
        step_time = now - max(previous_s, self.time_s)
        scale = float(values.get("loss_scale", 0.0))
        scaled_down = scale > 1 and not math.isfinite(grad_norm)  # an overflow at scale 1 is an error
        gradient_finite = math.isfinite(loss) and (math.isfinite(grad_norm) or scaled_down)
        spike = bool(values.get("spike", False)) and gradient_finite and not scaled_down
        skipped = "nonfinite" if not gradient_finite else "spike" if spike else ""
        if not values["weights_finite"] or (not gradient_finite and config.on_nonfinite != "skip"):
            text = f"Step {self.step} is {self.describe('nonfinite', config)}."
            raise NonFiniteError(text, before_update=not gradient_finite)
        if spike and config.on_spike != "skip":
            raise SpikeError(f"Step {self.step} is {self.describe('spike', config)}. It did not change the weights.")
        record = {
            "step": self.step,
            "loss": _finite(loss),
            **({"layer_loss": _finite(float(values["layer_loss"]))} if "layer_loss" in values else {}),
            "grad_norm": _finite(grad_norm),
            "learning_rate": float(values["learning_rate"]),
            **throughput.rates(step_time),
        }
        return record | ({"loss_scale": scale} if scale else {}) | ({"skipped": skipped} if skipped else {}), now

    def describe(self, kind: str, config: TrainConfig) -> str:
        """What is wrong with a done step, as the end of 'The step is …'; `kind` is `nonfinite` or `spike`."""
        loss, grad_norm = (float(self.metrics[name]) for name in ("loss", "grad_norm"))
        if kind == "nonfinite":
            return f"not finite: loss {loss}, gradient norm {grad_norm}. {self._nonfinite_gradients()}"
        usual_loss, usual_norm = (float(self.metrics[name]) for name in ("usual_loss", "usual_grad_norm"))
        return (
            f"a spike: loss {loss:.4g}, usually {usual_loss:.4g}; gradient norm {grad_norm:.4g}, usually "
            f"{usual_norm:.4g}; train.spike_bound={config.spike_bound:g}"
        )

    def _nonfinite_gradients(self) -> str:
        names = []
        flags = jax.device_get(self.metrics["nonfinite"])
        for path, flag in jax.tree_util.tree_leaves_with_path(flags):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            layers = np.flatnonzero(flag)
            if flag.ndim and len(layers):
                which = "all layers" if len(layers) == len(flag) else f"layers {', '.join(map(str, layers))}"
                names.append(f"{name} ({which})")
            elif flag.any():
                names.append(name)
        if all(map(np.all, jax.tree.leaves(flags))):
            names = ["all"]
        return f"Gradients that are not finite: {', '.join(names) or 'none; the weights overflowed in the update'}"


class InFlight:
    """The steps that the host has dispatched and whose records it has not made yet."""

    def __init__(self, throughput: Throughput, stopwatch: Stopwatch, config: TrainConfig):
        self._throughput, self._stopwatch, self._config = throughput, stopwatch, config
        self._last: Dispatched | None = None
        self._done_s = -math.inf  # when the host saw the end of the last step that it has a record of
        self._waited = False  # whether it saw that end as it came
        self._step_s = 0.0

    def dispatched(self, step: int, metrics: Metrics) -> Dispatched:
        """Notes that the host has just dispatched a step, and asks for its metrics.

        A device may serve copies to the host and steps in the order in which they were asked for: a copy that is asked
        for when the next step has been dispatched would end with that one.
        """
        self._last = Dispatched(step, metrics, time.monotonic())
        for name in _READ:
            if name in metrics:
                metrics[name].copy_to_host_async()
        return self._last

    def record(self, dispatched: Dispatched) -> Record:
        """Waits for a step; returns its record. Errors are those of `Trainer.record`."""
        waits = not dispatched.is_done()
        with self._stopwatch.measure(Activity.DEVICES):
            record, done_s = dispatched.record(self._done_s, self._throughput, self._config)
        if waits and self._waited:
            self._step_s = done_s - self._done_s  # the devices had nothing else to do in between
        self._waited, self._done_s = waits, done_s
        return record

    def idle_s(self, waited_s: float) -> float:
        """For how many of the last `waited_s` seconds, in which the host dispatched nothing, the devices were idle.

        The result is exact where the devices still run the last step (0), or where there was none. Otherwise it is an
        estimate: the seconds beyond those that a step was last seen to take.
        """
        if self._last is None:
            return waited_s
        return max(waited_s - self._step_s, 0.0) if self._last.is_done() else 0.0


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
