"""Predicts the time of a step if something were different, without trying it. Trains nothing.

    fiddlex what_if --config=gpt3:18.4b --topology=a100_80 --change=bandwidth*2
    fiddlex what_if --config=… --topology=h100 --change=mesh.outermost=pipe
    fiddlex what_if --config=… --profile=here.json --change=num_microbatches=8 --change=recompute=full

Each change is predicted by itself, then all changes together. A change sets a field of the config, by its full name
(`mesh.pipe=4`) or a short name, or changes the hardware or the optimizer: `bandwidth*2`, `latency*2`, `chip=h200`,
`fused_optimizer`. With a topology the table also shows the memory that a device needs, and whether it fits.
"""

import json
from typing import Any

from absl import flags

from fiddlex.errors import ConfigError
from fiddlex.hardware.topology import load_topology
from fiddlex.planner.profile import load_profile
from fiddlex.planner.report import table
from fiddlex.terminal.command_line import define_config, define_path
from fiddlex.terminal.readable import gib
from fiddlex.tools.what_if import Estimate, Scenario, what_if

STRAY_ARGUMENT = "change"

_CONFIG = define_config()
_TOPOLOGY = flags.DEFINE_string("topology", None, "name of the catalogue or a .toml file; this or --profile")
_PROFILE = define_path("profile", None, "what `fiddlex benchmark --profile` wrote; this or --topology")
_CHANGES = flags.DEFINE_multi_string("change", [], "what is different; may be given several times")
_FORMAT = flags.DEFINE_enum("format", "text", ["text", "json"], "json: one JSON object last on standard output")


def main(argv: list[str]) -> None:
    """Prints the answers."""
    if (_TOPOLOGY.value is None) == (_PROFILE.value is None):
        raise ConfigError("Give one of --topology, for times that follow from hardware, and --profile, for measured.")
    scenario = Scenario(
        _CONFIG.value.validate(),
        topology=load_topology(_TOPOLOGY.value) if _TOPOLOGY.value else None,
        profile=load_profile(_PROFILE.value) if _PROFILE.value else None,
    )
    outcome = scenario.estimate()
    answers = what_if(scenario, _CHANGES.value, outcome)
    if _FORMAT.value == "json":
        changes = [{"change": answer.change, **facts(answer.after), "ratio": answer.ratio} for answer in answers]
        print(json.dumps({**facts(outcome), "changes": changes}))
        return
    rows = [["", "step, s", "of it", "devices", "GiB", "host GiB", "fits"], row("as it is", outcome)]
    rows += [row(answer.change, answer.after, f"{answer.ratio:.3f}") for answer in answers]
    if not any(each.host_bytes for each in (outcome, *(answer.after for answer in answers))):
        rows = [[*before, fits] for *before, _, fits in rows]
    print(table(rows))


def facts(outcome: Estimate) -> dict[str, Any]:
    """The facts of an estimate as a JSON object, for programs."""
    return {"step_time_s": outcome.seconds, **{k: v for k, v in outcome._asdict().items() if k != "seconds"}}


def row(name: str, outcome: Estimate, ratio: str = "") -> list[str]:
    """The table row of an estimate, for people."""
    memory = "" if outcome.peak_bytes is None else gib(outcome.peak_bytes)
    fits, on_host = {None: "", True: "yes", False: "no"}[outcome.fits], gib(outcome.host_bytes or 0)
    return [name, f"{outcome.seconds:.4g}", ratio, f"{outcome.num_devices}", memory, on_host, fits]
