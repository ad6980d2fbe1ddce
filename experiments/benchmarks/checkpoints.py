"""What checkpoints cost a run: as often as `auto` saves them, beside saving synchronously and orbax's defaults.

    python -m experiments.benchmarks.checkpoints [--seconds=120 --folder=/data/tmp]

A GPT of 86 million parameters (wide embeddings, one layer), whose state with AdamW's moments has 1.03 GB, trains on one
device. Systems take turns, each with fresh checkpoints:

- auto: `train.checkpoint_every=auto`; then the same with writes that take four times as long from the middle on (the
  writer sleeps for three times as long as it wrote).
- synchronous: fiddlex's checkpoints at the interval that `auto` had chosen last, and the run waits until each is safe.
- orbax: `ocp.CheckpointManager` with its defaults at the same interval: asynchronous, without checksums and digests.

"Stall" is the time for which a save holds the loop, the median of all but the first of a turn. "Overhead" is the share
by which saves lengthen the steps between them: the stalls, and the time by which steps beside the background writer are
longer than the median of the other steps in the same turn. The first save of a turn, from which `auto` learns the cost,
is left out, and so is the last; with slow writes, so are all saves before. A turn goes on after its seconds until it
has saved often enough. "Restore" is the time that an empty trainer takes for the newest checkpoint. A save before all
turns compiles what saves run on the devices.
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
from fiddlex.terminal.command_line import define_changes, run
from fiddlex.train.run.checkpoints import writer as checkpoint_writer
from fiddlex.train.run.checkpoints.checkpoint import Checkpoints
from fiddlex.train.run.checkpoints.save_interval import FIRST_STEPS, SaveInterval
from fiddlex.train.trainer import Trainer


def _config() -> Config:
    config = Config()
    config.model.num_layers, config.model.hidden_size, config.model.num_heads = 1, 768, 12
    config.model.vocab_size, config.model.seq_len = 102400, 16
    config.data.global_batch_size, config.train.num_steps = 2, 10**6
    config.train.checkpoint_every = "auto"
    return config


_CONFIG = define_changes(_config())
_SAVES = 4  # of a turn, at least; the first and the last are left out
_SECONDS = flags.DEFINE_float("seconds", 120.0, "of each turn, at least", lower_bound=1)
_FOLDER = flags.DEFINE_string("folder", None, "where the checkpoints are written; by default a temporary folder")


class Row(NamedTuple):
    """What one system cost.

    Attributes:
      system: its name.
      interval: steps from one save to the next, at the end.
      saves: number of saves.
      stall_s: median seconds for which a save held the loop.
      overhead: share of the time of steps that saves added.
      restore_s: seconds to restore the newest checkpoint.
    """

    system: str
    interval: int
    saves: int
    stall_s: float
    overhead: float
    restore_s: float


class Turn:
    """Takes steps and saves for some seconds.

    Args:
      trainer: a trainer whose step is compiled.
      writes: whether a checkpoint is being written in the background.
    """

    def __init__(self, trainer: Trainer, writes: Callable[[], bool]):
        self.trainer, self._writes = trainer, writes
        self._saves: list[_Save] = []
        self._alone_s: list[float] = []  # of steps without the writer beside them

    def go(
        self,
        seconds: float,
        is_due: Callable[[int], bool],
        save: Callable[[], None],
        done: Callable[[], None] = lambda: None,
    ) -> None:
        """Takes steps for at least `seconds` and `_SAVES` saves, then until no checkpoint is being written any more."""
        end_s, enough = time.monotonic() + seconds, self.num_saves + _SAVES
        while (goes_on := time.monotonic() < end_s or self.num_saves < enough) or self._writes():
            times, start_s = self._saves[-1].beside_s if self._writes() else self._alone_s, time.monotonic()
            self.trainer.record(self.trainer.dispatch())
            times.append(time.monotonic() - start_s)
            done()
            if goes_on and is_due(self.trainer.step):
                start_s = time.monotonic()
                save()
                self._saves.append(_Save(self.trainer.step, time.monotonic() - start_s, []))

    @property
    def num_saves(self) -> int:
        """The number of saves so far."""
        return len(self._saves)

    def stall_s(self) -> float:
        """The median seconds for which a save held the loop, without the first."""
        return statistics.median(save.stall_s for save in self._saves[1:])

    def overhead(self, first: int) -> float:
        """The share by which the saves from number `first` on lengthened the steps up to the last save, left out."""
        saves = self._saves[first:-1]
        step_s = statistics.median(self._alone_s)
        slower_s = sum(took_s - step_s for save in saves for took_s in save.beside_s)
        return (sum(save.stall_s for save in saves) + slower_s) / ((self._saves[-1].step - saves[0].step) * step_s)


class _Save(NamedTuple):
    step: int
    stall_s: float
    beside_s: list[float]  # of the steps while the checkpoint was being written


def auto(trainer: Trainer, folder: pathlib.Path, *, slow: bool) -> tuple[Row, int]:
    """The row of `auto`, and the interval that it had chosen last."""
    config = trainer.config.train
    slowness = 0.0
    record_all = checkpoint_writer.record_all

    def slowly(*arguments: object) -> None:
        record_all(*arguments)  # type: ignore[arg-type]
        time.sleep(slowness * (time.monotonic() - begun_s))

    begun_s, decisions = 0.0, []
    checkpoint_writer.record_all = slowly  # type: ignore[assignment]
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

            turn = Turn(trainer, checkpoints.is_writing)
            turn.go(_SECONDS.value, saves.is_due, save, done)
            first = 1
            if slow:
                slowness, first = 3.0, turn.num_saves
                turn.go(_SECONDS.value, saves.is_due, save, done)
    finally:
        checkpoint_writer.record_all = record_all
    name = "auto, writes four times as slow" if slow else "auto"
    interval = decisions[-1].steps
    overhead, stall_s = turn.overhead(first), turn.stall_s()
    restore_s = restored(trainer.config, folder)
    return Row(name, interval, turn.num_saves, stall_s, overhead, restore_s), interval


def synchronous(trainer: Trainer, folder: pathlib.Path, interval: int) -> Row:
    """The row of a run that waits for each save."""
    with Checkpoints(folder) as checkpoints:

        def save() -> None:
            trainer.save(checkpoints)
            checkpoints.wait()

        turn = Turn(trainer, checkpoints.is_writing)
        turn.go(_SECONDS.value, _every(trainer, interval), save)
    overhead, stall_s = turn.overhead(1), turn.stall_s()
    restore_s = restored(trainer.config, folder)
    return Row("synchronous", interval, turn.num_saves, stall_s, overhead, restore_s)


def orbax(trainer: Trainer, folder: pathlib.Path, interval: int) -> Row:
    """The row of orbax's own manager with its defaults."""
    with ocp.CheckpointManager(folder.absolute()) as manager:

        def save() -> None:
            state = trainer.state
            items = {"weights": state.weights, "optimizer": state.optimizer}
            manager.save(trainer.step, args=ocp.args.StandardSave(items))

        turn = Turn(trainer, manager.is_saving_in_progress)
        turn.go(_SECONDS.value, _every(trainer, interval), save)
        manager.wait_until_finished()
        start_s = time.monotonic()
        manager.restore(manager.latest_step(), args=ocp.args.StandardRestore())
        restore_s = time.monotonic() - start_s
    overhead, stall_s = turn.overhead(1), turn.stall_s()
    return Row("orbax's defaults", interval, turn.num_saves, stall_s, overhead, restore_s)


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
    with Checkpoints(folder / "compiled") as checkpoints:
        trainer.save(checkpoints)
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
            print(
                f"| {row.system} | {row.interval} | {row.saves} | {row.stall_s:.2f} | {row.overhead:.1%} | "
                f"{row.restore_s:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    run(main)
