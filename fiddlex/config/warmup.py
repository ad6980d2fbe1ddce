"""A warm-up that is longer than the run."""

from fiddlex.config.config import Config
from fiddlex.config.values.schedule_source import is_function


def long_warmup(config: Config) -> str:
    """What is wrong where a run would end before its learning rate has risen; empty where it has time to rise.

    With `optimizer.decay_steps` the run is a part of a longer schedule, and nothing is wrong. What a function of the
    user's makes of the warm-up is not known.
    """
    optimizer, steps = config.optimizer, config.train.num_steps
    if optimizer.decay_steps or optimizer.warmup_steps <= steps or is_function(optimizer.schedule):
        return ""
    return (
        f"optimizer.warmup_steps={optimizer.warmup_steps} is longer than the run, train.num_steps={steps}: the "
        f"learning rate rises to {optimizer.learning_rate * steps / optimizer.warmup_steps:.3g} and never to "
        f"optimizer.learning_rate={optimizer.learning_rate:g}. Set optimizer.warmup_steps={steps // 10}, for example; "
        "or optimizer.decay_steps, the length of the whole schedule, to train the first steps of a longer run."
    )
