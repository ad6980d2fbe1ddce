"""Predicts the time and memory of a step after a change of config or hardware, without running it.

This follows Daydream (Zhu et al., ATC 2020), whose changes rewrite a trace of kernels; here they rewrite a scenario,
the inputs of the prediction. Users write changes as `bandwidth*2`, `chip=h200`, `recompute=none` or `fused_optimizer`;
the table `CHANGES` lists those that are not config fields.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fiddlex.config import Config, rules
from fiddlex.config.config import check_field
from fiddlex.config.fields import short_names
from fiddlex.config.overrides import is_field, override
from fiddlex.costs.backend import backend_of
from fiddlex.costs.weight_memory import num_moments
from fiddlex.errors import ConfigError
from fiddlex.hardware.topology import Topology, load_topology
from fiddlex.planner.cost_model import CostModel
from fiddlex.planner.layouts import Problem
from fiddlex.planner.predict import StepModel, needed_memory, predict
from fiddlex.planner.profile import Profile, ProfiledCostModel
from fiddlex.planner.settle import settle

_FORM = re.compile(r"(?P<name>[a-z0-9_.]+)(?:(?P<sign>[=*])(?P<value>.*))?")
_SHORT = short_names(Config)


@dataclasses.dataclass(frozen=True)
class Scenario:
    """The inputs of a prediction: a config, and either a topology or a profile."""

    config: Config
    topology: Topology | None = None  # None: the machine of the profile
    profile: Profile | None = None  # measured times; None: the times follow from the topology
    update: float = 1.0  # factor on the time of the optimizer's update

    def seconds(self) -> float:
        """Seconds of a step; raises ConfigError when the config is invalid, or `predict` cannot predict it."""
        parts = predict(self._settled(), self._model())
        return parts._replace(step=parts.step._replace(update=self.update * parts.step.update)).seconds

    def estimate(self) -> "Estimate":
        """The predicted time and memory of a step; raises what `seconds` raises."""
        config = self._settled()
        seconds, devices = dataclasses.replace(self, config=config).seconds(), config.mesh.num_devices
        if self.topology is None:
            return Estimate(seconds, devices, None, None, None)
        memory = needed_memory(config, backend_of(self.topology.compiler))
        problem = Problem(config, self.topology, devices)
        fits = memory.peak <= problem.limit and memory.of_host <= problem.host_limit
        return Estimate(seconds, devices, memory.peak, memory.of_host, fits)

    def _settled(self) -> Config:
        return settle(self.config.validate(), self.topology, profile=self.profile)

    def _model(self) -> StepModel:
        if self.profile is not None:
            return ProfiledCostModel(self.config, self.profile)
        assert self.topology is not None  # a scenario has a profile or a topology
        return CostModel(self.config, self.topology)


class Estimate(NamedTuple):
    """The predicted time and memory of a step of a scenario."""

    seconds: float
    num_devices: int
    # bytes of memory that the step takes on each device; None: unknown, since the scenario has a profile
    peak_bytes: int | None
    host_bytes: int | None  # bytes that each device keeps in the memory of its host; None: unknown
    # whether the device has `peak_bytes` and `layouts.HEADROOM` more, and its host `host_bytes`; None: unknown
    fits: bool | None


def _scaled_links(field: str) -> Callable[[Scenario, str], Scenario]:
    def change(scenario: Scenario, value: str) -> Scenario:
        topology, factor = _topology(scenario, field), _number(field, value)
        scaled = tuple(dataclasses.replace(link, **{field: getattr(link, field) * factor}) for link in topology.links)
        return dataclasses.replace(scenario, topology=dataclasses.replace(topology, links=scaled))

    return change


def _other_chip(scenario: Scenario, value: str) -> Scenario:
    """The scenario with another chip, and the compiler for that chip, on the same links."""
    topology, other = _topology(scenario, "chip"), load_topology(value)
    changed = dataclasses.replace(topology, chip=other.chip, compiler=other.compiler)
    return dataclasses.replace(scenario, topology=changed)


def _fused_optimizer(scenario: Scenario, value: str) -> Scenario:
    """The scenario with an update in one pass, which reads the gradient once rather than once more for its norm."""
    passes = 3 + 2 * num_moments(scenario.config.optimizer.name, scenario.config.optimizer.momentum)
    return dataclasses.replace(scenario, update=passes / (passes + 1))


class Change(NamedTuple):
    """A kind of change."""

    sign: str  # sign between name and value, `=` or `*`; empty: the change takes no value
    apply: Callable[[Scenario, str], Scenario]  # function from a scenario and a value to the changed scenario


CHANGES = {
    "bandwidth": Change("*", _scaled_links("bandwidth")),
    "latency": Change("*", _scaled_links("latency_s")),
    "chip": Change("=", _other_chip),
    "fused_optimizer": Change("", _fused_optimizer),
}


def apply(scenario: Scenario, change: str) -> Scenario:
    """The scenario after one of `CHANGES`, or with a field set by its full (`mesh.pipe=4`) or short name (`pipe=4`).

    Raises:
      ConfigError: when there is no such change, or the change needs a topology and the scenario has none.
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
        hint = rules.nearest(name, [*CHANGES, *_SHORT])
        if "." in name:
            try:
                check_field(name)
            except ConfigError as error:
                hint = str(error)
        raise ConfigError(f"--change={change}: {hint} Or a field, as mesh.pipe=4.")
    if sign != "=" or value is None:
        raise ConfigError(f"--change={change}: write {name}=VALUE.")
    return dataclasses.replace(scenario, config=override(scenario.config, f"{path}={value}"))


class Answer(NamedTuple):
    """The effect of a change."""

    change: str  # text of the change, or of several changes joined by "and"
    before: Estimate
    after: Estimate

    @property
    def ratio(self) -> float:
        return self.after.seconds / self.before.seconds


def what_if(scenario: Scenario, changes: Sequence[str], before: Estimate | None = None) -> list[Answer]:
    """The effect of each change by itself; where there are several, the last answer is for all of them together.

    Args:
      scenario: the scenario before the changes.
      changes: the changes, each written as for `apply`.
      before: result of `scenario.estimate()`; None: the function computes it.

    Raises:
      ConfigError, ScheduleError: when `apply` or `Scenario.estimate` raises them.
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
