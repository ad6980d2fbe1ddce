"""Weight-update semantics: by how many updates the weights that a batch uses lag behind the newest weights.

A stage with delay D runs batch b forward and backward with W(b − D), where W(k) is the weights after k updates and
W(k) = W(0) for k < 0; then W(b + 1) = optimizer(W(b), gradient of batch b). A delay lets a pipeline continue from one
batch to the next without draining: batch b may start when update b − D − 1 is done. All stages are updated at once,
between batches. In PipeDream each stage updates its weights on its own; `stash` uses the same weights as PipeDream, but
does not have its speed or memory.

Sources: for 2BW, Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, ICML 2021, section 3.1; for weight
stashing and vertical sync, Harlap et al., PipeDream (SOSP 2019), section 3.3, where a batch is one microbatch.
"""

import dataclasses
import re
import reprlib
from typing import NamedTuple

from fiddlex.config.rules import nearest
from fiddlex.config.user_code.own_functions import Own
from fiddlex.config.values.schedule_source import is_function, source_of
from fiddlex.errors import ConfigError
from fiddlex.schedules.schedule import Action

NAMES = ("sync", "2bw", "stash", "vertical_sync", "delay:K", "PATH.py:FUNCTION")
MOST_DELAY = 999
AUTO = "auto"  # a schedule whose phases are decided during the run (`fiddlex.train.sync_switch`)
AUTO_SEMANTICS = ("sync", "2bw")


@dataclasses.dataclass(frozen=True)
class Semantics:
    """The delay of each stage's weights."""

    delays: tuple[int, ...]  # of each stage's weights, in updates
    batch_size: int  # in microbatches

    @property
    def num_versions(self) -> int:
        """Number of weight versions that are needed at the same time."""
        return 1 + max(self.delays)

    def version(self, action: Action) -> int:
        """Number of updates in the weights that an action uses."""
        return max(self.batch(action.microbatch) - self.delays[action.stage], 0)

    def batch(self, microbatch: int) -> int:
        """The batch that a microbatch belongs to; microbatch numbers continue across batches."""
        return microbatch // self.batch_size


def make_semantics(name: str, *, num_stages: int, batch_size: int, field: str = "pipeline.semantics") -> Semantics:
    """Returns the semantics `name` for a pipeline.

    Args:
      name: `sync` (a flush after each batch), `2bw` (delay 1), `stash` (stage s of n has delay n − 1 − s),
        `vertical_sync` (all stages have delay n − 1), `delay:K` with K at most 999, or `PATH.py:FUNCTION`, a function
        of the keyword arguments `num_stages` and `num_microbatches` that returns the delay of each stage.
      num_stages: number of stages, n.
      batch_size: number of microbatches in a batch.
      field: the config field that error messages say `name` comes from.

    Raises:
      ConfigError: when `name` is not one of these, or the function fails or returns no delays.
    """
    _check(name, field)
    if is_function(name):
        return Semantics(_own_delays(name, field, num_stages=num_stages, num_microbatches=batch_size), batch_size)
    if name == "stash":
        return Semantics(tuple(reversed(range(num_stages))), batch_size)
    delay = {"sync": 0, "2bw": 1, "vertical_sync": num_stages - 1}.get(name)
    return Semantics((int(name.partition(":")[2]) if delay is None else delay,) * num_stages, batch_size)


def _own_delays(name: str, field: str, **sizes: int) -> tuple[int, ...]:
    own, source = _own(field), source_of(name)
    function = own.load(source.path, source.function)
    with own.naming(name):
        delays = own.call(function, source.path, sizes)
        is_sequence = isinstance(delays, list | tuple) and all(type(delay) is int for delay in delays)
        if not (is_sequence and len(delays) == sizes["num_stages"] and all(0 <= d <= MOST_DELAY for d in delays)):
            raise ConfigError(
                f"for num_stages={sizes['num_stages']} it returned {reprlib.repr(delays)}. It must return a tuple with "
                f"the delay of each stage, in updates, an integer from 0 to {MOST_DELAY}."
            )
        return tuple(delays)


def _own(field: str) -> Own:
    return Own(field, "(*, num_stages, num_microbatches)", ConfigError)


def _check(name: str, field: str) -> None:
    if name == AUTO:
        inside = "write it alone: the run itself decides where its phases begin" if field.endswith("schedule") else ""
        raise ConfigError(
            f"{field}: auto is a schedule, not one kind of semantics; "
            f"{inside or 'set pipeline.semantics_schedule=auto, and leave pipeline.semantics sync'}."
        )
    if is_function(name):
        source = source_of(name)
        _own(field).load(source.path, source.function)
        return
    if name in NAMES[:-2] or re.fullmatch(r"delay:\d{1,3}", name, re.ASCII):
        return
    if name.startswith("delay:"):
        raise ConfigError(f"{field}: {name!r} must be delay:K with K a number of updates, at most 999, as in delay:2.")
    if "," in name:
        raise ConfigError(f"{field}={name!r} names one kind of semantics; phases go into pipeline.semantics_schedule.")
    raise ConfigError(f"{field}: there are no semantics {name!r}. {nearest(name.lower(), NAMES)}")


class Phase(NamedTuple):
    """Consecutive steps of a run with the same semantics: from `start` up to but not including `end`."""

    semantics: str
    start: int
    end: int


def make_phases(semantics: str, schedule: str, num_steps: int) -> tuple[Phase, ...]:
    """The phases of a run; the pipeline drains at the end of each phase.

    `schedule` has the phases, each but the last with its length as a share of the run or in steps, as in `sync:0.2,2bw`
    or `sync:100,2bw:0.8,sync`. Empty: one phase with `semantics`, which must be `sync` otherwise. `auto`: one phase of
    sync, with which a run starts that decides about further ones.
    """
    if schedule and semantics != "sync":
        raise ConfigError(
            f"pipeline.semantics={semantics} and pipeline.semantics_schedule={schedule!r}: one run has either. Set "
            f"pipeline.semantics_schedule= (empty) for {semantics} all along, or pipeline.semantics=sync for the "
            "schedule."
        )
    if schedule.lower() == AUTO != schedule:
        raise ConfigError(f"pipeline.semantics_schedule={schedule!r}: write {AUTO!r}.")
    if schedule == AUTO:
        return (Phase(AUTO_SEMANTICS[0], 0, num_steps),)
    *parts, last = schedule.split(",") if schedule else [semantics]
    phases, start = [], 0
    for part in parts:
        name, _, length = part.strip().rpartition(":")
        match = re.fullmatch(r"(\d{1,9})|([01]?\.\d{1,9})", length, re.ASCII)
        if part.strip().startswith(":"):
            raise _unreadable(schedule, f"{part.strip()!r} names no semantics")
        if AUTO in (name, part.strip()):
            raise _unreadable(schedule, f"{AUTO!r} stands alone, without phases beside it")
        if not name or not length or name == "delay" or name.endswith(".py"):
            raise _unreadable(schedule, f"{part.strip()!r} has no length")
        if match is None:
            what = f"the length {length!r} is neither a number of steps nor a share such as 0.2"
            raise _unreadable(schedule, what)
        end = start + (int(length) if match[1] else round(float(length) * num_steps))
        phases.append(Phase(name, start, end))
        start = end
    if parts and not last.strip():
        raise _unreadable(schedule, "there is nothing behind the last comma")
    if schedule and re.fullmatch(r"[a-z0-9_]+:[\d.]+", last.strip()) and not last.strip().startswith("delay:"):
        raise _unreadable(schedule, f"the last phase, {last.strip()!r}, takes what is left and has no length")
    if start > num_steps or (start == num_steps and parts):
        raise _unreadable(schedule, f"its phases before the last take {start} of train.num_steps={num_steps} steps")
    phases.append(Phase(last.strip(), start, num_steps))
    for phase in phases:
        _check(phase.semantics, "pipeline.semantics_schedule" if schedule else "pipeline.semantics")
    for part in parts:  # a share may be less than half a step
        if re.fullmatch(r".*:0+", part.strip()):
            raise _unreadable(schedule, f"the phase {part.strip()!r} takes no step")
    return tuple(phase for phase in phases if phase.end > phase.start or len(phases) == 1)


def _unreadable(schedule: str, why: str) -> ConfigError:
    return ConfigError(
        f"pipeline.semantics_schedule={schedule!r}: {why}. Write each phase but the last with its length, a share of "
        "the run or a number of steps, as in sync:0.2,2bw or sync:100,2bw:0.75,sync."
    )
