"""Whether the learning rate jumps where a run goes on with other fields, such as more steps."""

import copy
import math

from fiddlex.config import Config
from fiddlex.config.values.schedule_source import is_function
from fiddlex.train.step.optimizer import learning_rate_schedule

_LEAST = 0.01  # relative difference that is told


def changed_rate(saved: Config, config: Config, updates: int) -> str:
    """How the learning rate jumps after `updates` updates; empty where the next one has the rate that `saved` gives."""
    before, now = copy.deepcopy(saved.optimizer), config.optimizer
    if is_function(before.schedule):
        if not is_function(now.schedule):
            return ""
        before.schedule = now.schedule  # the user's own; what a workdir names is never run
    former = learning_rate_schedule(before, saved.train.num_steps)
    later = learning_rate_schedule(now, config.train.num_steps)
    expected, rate = float(former(updates)), float(later(updates))
    if not updates or math.isclose(rate, expected, rel_tol=_LEAST):
        return ""
    length = saved.optimizer.decay_steps or saved.train.num_steps
    decay = "" if saved.optimizer.schedule == "constant" else f"optimizer.decay_steps={length} and "
    return (
        f"The learning rate changes from {float(former(updates - 1)):.3g} in update {updates} to {rate:.3g} in the "
        f"next one, for which the run's former schedule has {expected:.3g}: train.num_steps or the optimizer's fields "
        f"have changed. To keep that schedule, set {decay}the other fields of the optimizer as they were."
    )
