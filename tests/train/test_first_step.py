"""What a run says when its first step is not finite: no update is to blame."""

import pathlib
import types
from typing import Any

import jax
import pytest

from fiddlex.config import Config, ModelConfig, TrainConfig
from fiddlex.errors import NonFiniteError
from fiddlex.train.loop import _Run
from fiddlex.train.run.profiling import Profiler
from fiddlex.train.run.watchdog import Watchdog
from fiddlex.train.step.dispatched import Dispatched
from fiddlex.train.step.stopwatch import Stopwatch


def exploding_run(config: Config) -> Any:
    """The bookkeeping of a run whose trainer finds the first step not finite."""

    def record(dispatched: Dispatched) -> None:
        raise NonFiniteError(f"Step {dispatched.step} is not finite: loss nan.")

    trainer = types.SimpleNamespace(
        config=config,
        step=0,
        delay=0,
        dispatch=lambda: Dispatched(1, {}, 0.0),
        record=record,
        stopwatch=Stopwatch(),
        mesh=types.SimpleNamespace(local_devices=jax.local_devices()),
    )
    unused: Any = None
    watchdog, profiler = Watchdog(pathlib.Path(), 0, trainer.stopwatch), Profiler(pathlib.Path(), config.train)
    return _Run(trainer, unused, unused, unused, unused, unused, unused, unused, watchdog, profiler)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "start", "remedy"),
    [
        (
            Config(model=ModelConfig(dtype="float16", init_std=100)),
            "the initial ones",
            "a model.init_std below 100 or model.dtype=float32 in place of float16.",
        ),
        (Config(), "the initial ones", "a model.init_std below 0.02."),
        (Config(train=TrainConfig(init_from="/a")), "those of train.init_from=/a", "another run in train.init_from."),
    ],
)
def test_weights_that_overflow_before_any_update_are_to_blame(config: Config, start: str, remedy: str) -> None:
    run = exploding_run(config)
    run.step()
    with pytest.raises(NonFiniteError) as raised:
        run.finish_step()
    assert str(raised.value) == (
        f"Step 1 is not finite: loss nan.\nThe weights are still {start}: no update has been made, so a lower "
        f"optimizer.learning_rate would not help. Use {remedy}"
    )
