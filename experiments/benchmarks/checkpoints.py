"""What checkpoints cost a run: as often as `auto` saves them, beside saving synchronously and orbax's defaults.

    python -m experiments.benchmarks.checkpoints [--seconds=120 --folder=/data/tmp]

A GPT of 86 million parameters (wide embeddings, one layer), whose state with AdamW's moments has 1.03 GB, trains on one
device. Systems take turns, each with fresh checkpoints:

- auto: `train.checkpoint_every=auto`; then the same with writes that take four times as long from the middle on (the
  writer sleeps for three times as long as it wrote).
- synchronous: fiddlex's checkpoints at the interval that `auto` had chosen last, and the run waits until each is safe.
- orbax: `ocp.CheckpointManager` with its defaults at the same interval: asynchronous, without checksums and digests.

"Stall" is the time for which a save holds the loop, the median of all but the first. "Overhead" is the share by which
the turn took longer than its steps would take without saves, whose median is measured beside. The first save of `auto`,
which it makes to learn the cost, is left out of both. "Restore" is the time that an empty trainer takes for the newest
checkpoint.
"""

import contextlib
import copy
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import orbax.checkpoint as ocp
from absl import flags

from fiddlex.config import Config
from fiddlex.config.command_line import define_changes, run
from fiddlex.errors import DeviceError
from fiddlex.train.run import checkpoint
from fiddlex.train.run.checkpoint import Checkpoints
from fiddlex.train.run.save_interval import FIRST_STEPS, SaveInterval
from fiddlex.train.trainer import Trainer


def _config() -> Config:
    config = Config()
    config.model.num_layers, config.model.hidden_size, config.model.num_heads = 1, 768, 12
    config.model.vocab_size, config.model.seq_len = 102400, 16
    config.data.global_batch_size, config.train.num_steps = 2, 10**6
    config.train.checkpoint_every = "auto"
    return config


_CONFIG = define_changes(_config())
_SECONDS = flags.DEFINE_float("seconds", 120.0, "of each turn, about", lower_bound=1)
_FOLDER = flags.DEFINE_string("folder", None, "where the checkpoints are written; by default a temporary folder")


class Row(NamedTuple):
    """What one system cost.

    Attributes:
      system: its name.
      interval: steps from one save to the next, at the end.
      saves: number of saves.
      stall_s: median seconds for which a save held the loop.
      overhead: share of the time of steps that saves added.
      restore_s: seconds to restore the newest checkpoint; None where fiddlex cannot read it.
    """

    system: str
    interval: int
    saves: int
    stall_s: float
    overhead: float
    restore_s: float | None


class Turn:
    """Takes steps and saves for some seconds.

    Args:
      trainer: with a compiled step.
      usual_s: seconds of a step without saves.
    """

    def __init__(self, trainer: Trainer, usual_s: float):
        self.trainer, self.usual_s = trainer, usual_s
        self.stalls: list[float] = []
        self.lost: list[tuple[int, float]] = []  # step, and the seconds by which the time since the last save was long
        self._begun_s, self._begun_step = time.monotonic(), trainer.step

    def go(
        self, seconds: float, is_due: Callable[[int], bool], save: Callable[[], None], done: Callable[[], None]
    ) -> None:
        """Takes steps until the time is over."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            self.trainer.record(self.trainer.dispatch())
            done()
            if is_due(self.trainer.step):
                self._account()
                start_s = time.monotonic()
                save()
                self.stalls.append(time.monotonic() - start_s)

    def _account(self) -> None:
        now, step = time.monotonic(), self.trainer.step
        self.lost.append((step - self._begun_step, now - self._begun_s - (step - self._begun_step) * self.usual_s))
        self._begun_s, self._begun_step = now, step

    def stall_s(self) -> float:
        """The median seconds for which a save held the loop, without the first, which compiles.

        Raises:
          DeviceError: when there was only that one.
        """
        if len(self.stalls) < 2:
            raise DeviceError("A turn was too short for two saves. Give more --seconds.")
        return statistics.median(self.stalls[1:])

    def overhead(self, *, first: int = 1) -> float:
        """The share that saves added to the steps between the save number `first` and the last."""
        steps = sum(number for number, _ in self.lost[first:])
        return sum(seconds for _, seconds in self.lost[first:]) / max(steps * self.usual_s, 1e-9)


def usual(trainer: Trainer, *, number: int = 15) -> float:
    """The median seconds of a step."""
    times = []
    for _ in range(number):
        start_s = time.monotonic()
        trainer.record(trainer.dispatch())
        times.append(time.monotonic() - start_s)
    return statistics.median(times)


def auto(trainer: Trainer, folder: pathlib.Path, *, slow: bool) -> tuple[Row, int]:
    """The row of `auto`, and the interval that it had chosen last."""
    config = trainer.config.train
    slowness = 0.0
    record_all = checkpoint.record_all

    def slowly(*arguments: object) -> None:
        record_all(*arguments)  # type: ignore[arg-type]
        time.sleep(slowness * (time.monotonic() - begun_s))

    begun_s, decisions = 0.0, []
    checkpoint.record_all = slowly  # type: ignore[assignment]
    try:
        with Checkpoints(folder) as checkpoints:
            saves = SaveInterval(config, trainer.step, writes=checkpoints.is_writing)

            def save() -> None:
                nonlocal begun_s
                begun_s = time.monotonic()
                with saves.saving(trainer.step):
                    trainer.save(checkpoints)

            def done() -> None:
                if decision := saves.step_done():
                    decisions.append(decision)

            turn = Turn(trainer, usual(trainer))
            turn.go(_SECONDS.value, saves.is_due, save, done)
            before = len(turn.lost)
            if slow:
                slowness = 3.0
                turn.go(_SECONDS.value, saves.is_due, save, done)
    finally:
        checkpoint.record_all = record_all
    name = "auto, writes four times as slow" if slow else "auto"
    first = before if slow else 2
    row = Row(
        name,
        decisions[-1].steps,
        len(turn.stalls),
        turn.stall_s(),
        turn.overhead(first=first),
        None,
    )
    return row._replace(restore_s=restored(trainer.config, folder)), decisions[-1].steps


def synchronous(trainer: Trainer, folder: pathlib.Path, interval: int) -> Row:
    """The row of a run that waits for each save."""
    with Checkpoints(folder) as checkpoints:

        def save() -> None:
            trainer.save(checkpoints)
            checkpoints.wait()

        turn = Turn(trainer, usual(trainer))
        turn.go(_SECONDS.value, _every(trainer, interval), save, lambda: None)
    return Row(
        "synchronous", interval, len(turn.stalls), turn.stall_s(), turn.overhead(), restored(trainer.config, folder)
    )


def orbax(trainer: Trainer, folder: pathlib.Path, interval: int) -> Row:
    """The row of orbax's own manager with its defaults."""
    with ocp.CheckpointManager(folder.absolute()) as manager:

        def save() -> None:
            state = trainer.state
            items = {"weights": state.weights, "optimizer": state.optimizer}
            manager.save(trainer.step, args=ocp.args.StandardSave(items))

        turn = Turn(trainer, usual(trainer))
        turn.go(_SECONDS.value, _every(trainer, interval), save, lambda: None)
        manager.wait_until_finished()
        start_s = time.monotonic()
        manager.restore(manager.latest_step(), args=ocp.args.StandardRestore())
        restore_s = time.monotonic() - start_s
    return Row("orbax's defaults", interval, len(turn.stalls), turn.stall_s(), turn.overhead(), restore_s)


def _every(trainer: Trainer, interval: int) -> Callable[[int], bool]:
    first = trainer.step + FIRST_STEPS
    return lambda step: step >= first and (step - first) % interval == 0


def restored(config: Config, folder: pathlib.Path) -> float:
    """Seconds to restore the newest checkpoint into a new trainer."""
    trainer = Trainer(copy.deepcopy(config))
    start_s = time.monotonic()
    with Checkpoints(folder) as checkpoints:
        assert trainer.restore(checkpoints)
    jax.block_until_ready(trainer.state)
    return time.monotonic() - start_s


def rows(folder: pathlib.Path) -> Iterator[Row]:
    """Runs each system."""
    trainer = Trainer(_CONFIG.value)
    trainer.record(trainer.dispatch())
    row, interval = auto(trainer, folder / "auto", slow=False)
    yield row
    yield auto(trainer, folder / "slow", slow=True)[0]
    yield synchronous(trainer, folder / "synchronous", interval)
    yield orbax(trainer, folder / "orbax", interval)


def main(argv: list[str]) -> None:
    """Prints the table."""
    print("| system | steps between saves | saves | stall, s | overhead | restore, s |\n|---|---:|---:|---:|---:|---:|")
    with contextlib.ExitStack() as stack:
        folder = _FOLDER.value or stack.enter_context(tempfile.TemporaryDirectory())
        for row in rows(pathlib.Path(folder)):
            restore = "" if row.restore_s is None else f"{row.restore_s:.1f}"
            print(
                f"| {row.system} | {row.interval} | {row.saves} | {row.stall_s:.2f} | {row.overhead:.1%} | {restore} |",
                flush=True,
            )


if __name__ == "__main__":
    run(main)
