"""What a step would take if something were different, without trying it.

A scenario is all that a prediction starts from; a change makes another scenario of it (Zhu et al., Daydream, ATC 2020,
whose changes rewrite a trace of kernels; here they rewrite what the simulator is run with). Changes are written as
`bandwidth*2`, `chip=h200`, `recompute=none` or `fused_optimizer`; the table `CHANGES` has those that are no config
field.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fiddlex.cluster.topology import Topology, load_topology
from fiddlex.config import Config, rules
from fiddlex.config.overrides import is_field, override
from fiddlex.costs.backend import backend_of
from fiddlex.costs.weight_memory import num_moments
from fiddlex.errors import ConfigError
from fiddlex.planner.cost_model import CostModel
from fiddlex.planner.layouts import Problem
from fiddlex.planner.predict import StepModel, needed_memory, predict
from fiddlex.planner.profile import Profile, ProfiledCostModel

_FORM = re.compile(r"(?P<name>[a-z0-9_.]+)(?:(?P<sign>[=*])(?P<value>.+))?")
_SHORT = {
    "data": "mesh.data",
    "pipe": "mesh.pipe",
    "tensor": "mesh.tensor",
    "global_batch_size": "data.global_batch_size",
    "recompute": "pipeline.recompute",
    "schedule": "pipeline.schedule",
    "semantics": "pipeline.semantics",
    "num_chunks": "pipeline.num_chunks",
    "num_microbatches": "pipeline.num_microbatches",
    "sequence_parallel": "mesh.sequence_parallel",
    "optimizer": "optimizer.name",
    "zero1": "optimizer.zero1",
    "dtype": "model.dtype",
}


@dataclasses.dataclass(frozen=True)
class Scenario:
    """What a prediction starts from: a config, and either a topology or a profile.

    Attributes:
      config: of the run.
      topology: that it runs on; None: the machine of the profile.
      profile: None: the times follow from the topology.
      update: what the optimizer's update takes, in parts of what it takes now.
    """

    config: Config
    topology: Topology | None = None
    profile: Profile | None = None
    update: float = 1.0

    def seconds(self) -> float:
        """Of a step.

        Raises:
          ConfigError: when the config is at odds with itself, or cannot be predicted (`predict`).
        """
        parts = predict(self.config.validate(), self._model())
        return parts._replace(step=parts.step._replace(update=self.update * parts.step.update)).seconds

    def estimate(self) -> "Estimate":
        """What a step takes.

        Raises:
          ConfigError, ScheduleError: as `seconds`.
        """
        seconds, devices = self.seconds(), self.config.mesh.num_devices
        if self.topology is None:
            return Estimate(seconds, devices, None, None)
        peak = needed_memory(self.config, backend_of(self.topology.compiler)).peak
        return Estimate(seconds, devices, peak, peak <= Problem(self.config, self.topology, devices).limit)

    def _model(self) -> StepModel:
        if self.profile is not None:
            return ProfiledCostModel(self.config, self.profile)
        assert self.topology is not None  # the one or the other
        return CostModel(self.config, self.topology)


class Estimate(NamedTuple):
    """What a step of a scenario takes.

    Attributes:
      seconds: of a step.
      num_devices: that it runs on.
      peak_bytes: of each device's memory; None: not known of the machine of a profile.
      fits: whether that is there, with what the planner leaves free (`layouts.HEADROOM`); None: not known.
    """

    seconds: float
    num_devices: int
    peak_bytes: int | None
    fits: bool | None


def _scaled_links(field: str) -> Callable[[Scenario, str], Scenario]:
    def change(scenario: Scenario, value: str) -> Scenario:
        topology, factor = _topology(scenario, field), _number(field, value)
        scaled = tuple(dataclasses.replace(link, **{field: getattr(link, field) * factor}) for link in topology.links)
        return dataclasses.replace(scenario, topology=dataclasses.replace(topology, links=scaled))

    return change


def _other_chip(scenario: Scenario, value: str) -> Scenario:
    """Another chip on the same links, with what compiles for it."""
    topology, other = _topology(scenario, "chip"), load_topology(value)
    changed = dataclasses.replace(topology, chip=other.chip, compiler=other.compiler)
    return dataclasses.replace(scenario, topology=changed)


def _fused_optimizer(scenario: Scenario, value: str) -> Scenario:
    """The update in one pass: the gradient, which is read once more for its norm, is read once."""
    passes = 3 + 2 * num_moments(scenario.config.optimizer.name, scenario.config.optimizer.momentum)
    return dataclasses.replace(scenario, update=passes / (passes + 1))


class Change(NamedTuple):
    """A kind of change.

    Attributes:
      sign: between name and value: `=`, `*`, or nothing where there is no value.
      apply: to a scenario.
    """

    sign: str
    apply: Callable[[Scenario, str], Scenario]


CHANGES = {
    "bandwidth": Change("*", _scaled_links("bandwidth")),
    "latency": Change("*", _scaled_links("latency_s")),
    "chip": Change("=", _other_chip),
    "fused_optimizer": Change("", _fused_optimizer),
}


def apply(scenario: Scenario, change: str) -> Scenario:
    """The scenario under a change.

    Args:
      scenario: as it is.
      change: a name of `CHANGES`, or a config field in full (`mesh.pipe=4`) or short (`recompute=none`).

    Raises:
      ConfigError: when there is no such change, or it needs a topology and there is none.
    """
    form = _FORM.fullmatch(change)
    name, sign, value = form.group("name", "sign", "value") if form else (change, None, None)
    if name in CHANGES:
        wanted = CHANGES[name].sign
        if (sign or "") != wanted:
            raise ConfigError(f"--change={change}: write {name}{wanted}{'VALUE' if wanted else ''}.")
        return CHANGES[name].apply(scenario, value or "")
    path = _SHORT.get(name, name)
    if not is_field(path):
        raise ConfigError(f"--change={change}: {rules.nearest(name, [*CHANGES, *_SHORT])} Or a field, as mesh.pipe=4.")
    if sign != "=" or value is None:
        raise ConfigError(f"--change={change}: write {name}=VALUE.")
    return dataclasses.replace(scenario, config=override(scenario.config, f"{path}={value}"))


class Answer(NamedTuple):
    """What a change comes to.

    Attributes:
      change: as it was written; all of them together last, where there are several.
      before: without it.
      after: with it.
    """

    change: str
    before: Estimate
    after: Estimate

    @property
    def ratio(self) -> float:
        """Of a step's seconds after to those before."""
        return self.after.seconds / self.before.seconds


def what_if(scenario: Scenario, changes: Sequence[str], before: Estimate | None = None) -> list[Answer]:
    """Each change by itself, and all of them one after another.

    Args:
      scenario: as it is.
      changes: see `apply`.
      before: `scenario.estimate()`, where it is known already.

    Raises:
      ConfigError, ScheduleError: as `apply` and `Scenario.outcome`.
    """
    before, together = before or scenario.estimate(), scenario
    answers = []
    for change in changes:
        answers.append(Answer(change, before, apply(scenario, change).estimate()))
        together = apply(together, change)
    if len(changes) > 1:
        answers.append(Answer(" and ".join(changes), before, together.estimate()))
    return answers


def _topology(scenario: Scenario, name: str) -> Topology:
    if scenario.topology is None:
        raise ConfigError(
            f"{name} is that of a topology; a profile has measured times alone. Give --topology in place of --profile."
        )
    return scenario.topology


def _number(name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        raise ConfigError(f"{name}*{value}: the factor must be a number, as in {name}*0.5.") from None
    rules.positive(f"{name}*{value}: the factor", number)
    return number
