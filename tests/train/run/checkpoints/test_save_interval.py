"""The interval of checkpoints keeps their overhead within its bound, as measured by the clock of a simulated run."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fiddlex.config import TrainConfig
from fiddlex.train.run.checkpoints.save_interval import FIRST_STEPS, Decision, SaveInterval, choose


@dataclasses.dataclass
class Run:
    """A run on a clock of its own, whose saves hold it, then are written while steps are slower.

    Attributes:
      step_s: seconds of a step.
      held_s: seconds for which a save holds the run.
      write_s: seconds that the disk takes for a save.
      slowdown: how many times as long a step takes while a save is written.
    """

    step_s: float = 1.0
    held_s: float = 2.0
    write_s: float = 10.0
    slowdown: float = 1.1

    def __post_init__(self) -> None:
        self.now_s = self.lost_s = self.safe_s = 0.0
        self.saves: list[int] = []
        self.decisions: list[Decision] = []

    def go(self, saves: SaveInterval, first: int, last: int, *, eval_every: int = 0) -> None:
        for step in range(first + 1, last + 1):
            seconds = self.step_s * (self.slowdown if self.writes() else 1)
            self.now_s, self.lost_s = self.now_s + seconds, self.lost_s + seconds - self.step_s
            if decision := saves.step_done():
                self.decisions.append(decision)
            if saves.is_due(step):
                assert not self.writes()  # the last save is safe
                with saves.saving(step):
                    self.now_s, self.lost_s = self.now_s + self.held_s, self.lost_s + self.held_s
                self.saves.append(step)
                self.safe_s = self.now_s + self.write_s
            if eval_every and step % eval_every == 0:
                with saves.excluding():
                    self.now_s += 3 * self.step_s

    def writes(self) -> bool:
        return self.now_s < self.safe_s


def interval(run: Run, **fields: float) -> SaveInterval:
    config = TrainConfig(checkpoint_every="auto", **fields)  # type: ignore[arg-type]
    return SaveInterval(config, 0, writes=run.writes, clock=lambda: run.now_s)


def test_a_fixed_interval_counts_steps() -> None:
    saves = SaveInterval(TrainConfig(checkpoint_every=3), 1, writes=lambda: False)
    assert [step for step in range(2, 10) if saves.is_due(step)] == [3, 6, 9]
    saves = SaveInterval(TrainConfig(), 0, writes=lambda: False)
    assert not any(saves.is_due(step) for step in range(1, 10))


@pytest.mark.parametrize("eval_every", [0, 1, 7])
@pytest.mark.parametrize("overhead", [0.01, 0.035, 0.2])
@pytest.mark.parametrize(("step_s", "held_s", "write_s"), [(1.0, 2.0, 10.0), (0.05, 0.4, 6.0), (3.0, 0.01, 100.0)])
def test_the_overhead_stays_within_its_bound(
    step_s: float, held_s: float, write_s: float, overhead: float, eval_every: int
) -> None:
    run = Run(step_s, held_s, write_s)
    run.go(interval(run, checkpoint_overhead=overhead), 0, 20_000, eval_every=eval_every)
    assert run.saves[0] == FIRST_STEPS
    later = run.saves[1:]
    assert len(later) > 3
    assert run.lost_s <= overhead * 20_000 * step_s + run.lost_s / len(run.saves)  # the first save is not planned
    slow_steps = math.ceil(write_s / (step_s * run.slowdown))
    cost_s = held_s + slow_steps * step_s * (run.slowdown - 1)
    least = max(cost_s / overhead, held_s + write_s) / step_s  # no seldomer than the bound allows
    assert later[-1] - later[-2] <= 1.3 * least + 3


def test_the_interval_grows_while_the_disk_is_slow_and_shrinks_again() -> None:
    run = Run(held_s=1.0, write_s=20.0, slowdown=1.05)
    saves = interval(run, checkpoint_overhead=0.035)
    run.go(saves, 0, 2000)
    usual = run.decisions[-1].steps
    before = run.now_s, run.lost_s
    run.held_s, run.write_s = 4.0, 80.0
    run.go(saves, 2000, 8000)
    slow = run.decisions[-1].steps
    assert slow == pytest.approx(4 * usual, rel=0.1)
    one_save_s = 4.0 + 80 * 0.05  # the first slow one came as a surprise
    assert run.lost_s - before[1] <= 0.035 * (run.now_s - before[0]) + one_save_s
    run.held_s, run.write_s = 1.0, 20.0
    run.go(saves, 8000, 12000)
    assert run.decisions[-1].steps == pytest.approx(usual, rel=0.1)


def test_no_save_begins_before_the_last_is_safe() -> None:
    run = Run(held_s=0.001, write_s=300.0, slowdown=1.0)
    run.go(interval(run, checkpoint_overhead=1.0), 0, 2000)  # asserts it at each save
    assert run.decisions[-1].steps == pytest.approx(300, abs=2)


TIMES = st.floats(1e-3, 1e3)


@given(step_s=TIMES, cost_s=TIMES, write_s=TIMES, hours=st.floats(0.1, 1000))
def test_no_other_interval_loses_less_time_with_failures(
    step_s: float, cost_s: float, write_s: float, hours: float
) -> None:
    failure_s = 3600 * hours
    chosen = choose(step_s=step_s, cost_s=cost_s, write_s=write_s, overhead=0.035, mean_time_to_failure_s=failure_s)

    def lost(steps: int) -> float:
        interval_s = steps * step_s
        return cost_s / interval_s + (interval_s / 2 + write_s) / failure_s

    assert chosen.steps * step_s >= write_s
    assert chosen.lost == pytest.approx(lost(chosen.steps))
    least = max(math.ceil(write_s / step_s), 1)
    for steps in {least, chosen.steps // 2, chosen.steps - 2, chosen.steps + 1, 2 * chosen.steps}:
        if steps >= least:
            assert lost(chosen.steps) <= lost(steps) * (1 + 1e-9) or steps == chosen.steps - 1


@given(step_s=TIMES, cost_s=TIMES, write_s=TIMES, overhead=st.floats(1e-3, 1))
def test_the_shortest_interval_within_the_overhead(
    step_s: float, cost_s: float, write_s: float, overhead: float
) -> None:
    chosen = choose(step_s=step_s, cost_s=cost_s, write_s=write_s, overhead=overhead)
    assert cost_s <= overhead * chosen.steps * step_s * (1 + 1e-9)
    shorter_s = (chosen.steps - 1) * step_s
    assert chosen.steps == 1 or cost_s > overhead * shorter_s * (1 - 1e-9) or write_s > shorter_s * (1 - 1e-9)


def test_decisions_are_told_in_words_and_numbers() -> None:
    chosen = choose(step_s=0.5, cost_s=1.4, write_s=10, overhead=0.035, mean_time_to_failure_s=36000)
    assert str(chosen) == (
        "Checkpoints every 635 steps (5 min 18 s): a save costs 1.4 s, which adds 0.4% to the time of steps, and is "
        "on disk after 10 s. A failure would cost 2 min 49 s of steps on average; saves and failures together add 0.9% "
        "to the time of steps."
    )
    assert chosen.to_record()["checkpoint_interval"] == 635
    chosen = choose(step_s=7200, cost_s=1.23e-5, write_s=0.02, overhead=0.035)
    assert str(chosen) == (
        "Checkpoints every step (2 h 00 min): a save costs 12 µs, which adds 0.0% to the time of steps, and "
        "is on disk after 20 ms. A failure would cost 1 h 00 min of steps on average."
    )
