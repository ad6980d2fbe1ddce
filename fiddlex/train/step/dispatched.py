"""A train step that the host has dispatched to the devices, and the record that it makes once it is done."""

import math
import time
from typing import NamedTuple

import jax
import numpy as np

from fiddlex.errors import NonFiniteError
from fiddlex.train.record import Record
from fiddlex.train.step.train_step import Metrics


class Dispatched(NamedTuple):
    """A step that the host has dispatched to the devices.

    Attributes:
      step: the step's number, counted from 1.
      metrics: the step's metrics on the devices, see `fiddlex.train.step.train_step.make_train_step`.
      time_s: when the host dispatched the step, by the monotonic clock.
    """

    step: int
    metrics: Metrics
    time_s: float

    def record(self, previous_s: float, tokens_per_step: int) -> tuple[Record, float]:
        """Waits for the step.

        Args:
          previous_s: when the step before was done, by the monotonic clock; −inf for the first one.
          tokens_per_step: the number of tokens of a batch.

        Returns:
          The step's record, see `Trainer.record`, and when the step was done.

        Raises:
          NonFiniteError: see `Trainer.record`.
        """
        names = ("loss", "grad_norm", "learning_rate", "weights_finite")
        loss, grad_norm, learning_rate, finite = map(float, jax.device_get([self.metrics[name] for name in names]))
        now = time.monotonic()
        step_time = now - max(previous_s, self.time_s)
        scale = float(self.metrics.get("loss_scale", 0.0))
        skipped = scale > 1 and not math.isfinite(grad_norm)  # by loss scaling; an overflow at scale 1 is an error
        gradient_finite = math.isfinite(loss) and (math.isfinite(grad_norm) or skipped)
        if not (gradient_finite and finite):
            text = self._describe_nonfinite(loss, grad_norm)
            raise NonFiniteError(text, before_update=not gradient_finite)
        record = {
            "step": self.step,
            "loss": loss,
            "grad_norm": None if skipped else grad_norm,
            "learning_rate": learning_rate,
            "step_time_s": step_time,
            "tokens_per_second": tokens_per_step / step_time,
        }
        return record | ({"loss_scale": scale} if scale else {}), now

    def _describe_nonfinite(self, loss: float, grad_norm: float) -> str:
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
        if len(names) == len(jax.tree.leaves(flags)):
            names = ["all"]
        return (
            f"Step {self.step} is not finite: loss {loss}, gradient norm {grad_norm}. "
            f"Gradients that are not finite: {', '.join(names) or 'none; the weights overflowed in the update'}."
        )
