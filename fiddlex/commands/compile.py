"""Compiles the train step of a config for devices that this machine need not have, and reports its costs.

    fiddlex compile --config=gpt_tiny [--topology=tpu:v5e:2x2 --memory --format=json …]

It trains nothing and reads no data. The report has the schedule, whether the step fits the memory of a device and of
its host, how XLA divides that memory, the collectives of a step, and the copies to and from hosts. Any field of the
config can be overridden, as for `fiddlex train`. A step that does not fit is a result like any other: the exit status
is 0, and the report names what may help. docs/ahead_of_time.md explains the figures.
"""

import json
import pathlib
from typing import Any

from absl import flags

from fiddlex.config import Config
from fiddlex.errors import ConfigError
from fiddlex.hardware.chips import HostMemory
from fiddlex.hardware.topology import catalogue, host_for, load_topology
from fiddlex.terminal import library_log
from fiddlex.terminal.command_line import define_config, define_path
from fiddlex.terminal.output_format import check_output
from fiddlex.terminal.progress import phase

_CONFIG = define_config()
_TOPOLOGY = flags.DEFINE_string(
    "topology",
    "cpu",
    "the devices to compile for, as many as config.mesh has. cpu: fake devices of this machine. tpu:NAME:SHAPE or "
    "tpu:NAME:SHAPE:SLICES: TPUs, as in tpu:v5e:2x4 or tpu:v5e:2x4:2 (needs the extra aot). gpu:NAME:HOSTSxPER_HOST: "
    "GPUs, as in gpu:h100:2x8 (needs the extra aot-gpu). A topology of `fiddlex plan`, as in a100_80, or a .toml file: "
    "its devices (needs the extra of TPUs or GPUs)",
)
_FORMAT = flags.DEFINE_enum("format", "text", ["text", "json"], "json: one JSON object last on standard output")
_MEMORY = flags.DEFINE_bool(
    "memory",
    False,
    "also report how many MiB weights, optimizer, gradients, stash and other parts take where the step uses most "
    "memory: what fiddlex predicts, and what XLA has assigned",
)
_PLOT = define_path(
    "plot",
    None,
    "with --memory: write a picture of these parts over the instructions of the step to this file, FILE.svg or "
    "FILE.png (needs the extra plot)",
)


def main(argv: list[str]) -> None:
    """Prints the report."""
    library_log.divert()
    config = _CONFIG.value.validate()
    plot = pathlib.Path(_PLOT.value) if _PLOT.value is not None else None
    if plot is not None:
        _check_plot(plot)

    with phase("Importing jax"):  # only after the command line has been checked
        from fiddlex.cluster.mesh import describe, make_topology_mesh
        from fiddlex.planner.settle import settle
        from fiddlex.xla.ahead_of_time import compile_ahead, report
        from fiddlex.xla.peak_memory import memory_parts
        from fiddlex.xla.report_text import lacks_host, report_text

    topology = _TOPOLOGY.value
    if topology in catalogue() or topology.endswith(".toml"):
        loaded = load_topology(topology)
        topology, host = loaded.compile_name(config.mesh.num_devices), loaded.host
        config = settle(config, loaded)
    else:
        host = host_for(topology)
    with phase("Starting the compiler"):
        mesh = make_topology_mesh(config.mesh, topology)
    ahead = compile_ahead(config, mesh, reads_memory=_MEMORY.value)
    config = ahead.program.config
    with phase("Reading the compiled step"):
        facts = {"topology": topology, **report(config, ahead)}
    facts |= host_facts(config, topology, host, planned=facts["host_bytes"])
    if _MEMORY.value:
        facts["memory_parts"] = memory_parts(config, topology, ahead.memory_use)
    if _FORMAT.value == "json":
        print(json.dumps(facts | ({"fits": False} if lacks_host(facts) else {})), flush=True)
    else:
        print(report_text(facts, config, describe(mesh)), flush=True)
    if plot is not None and ahead.memory_use is not None:  # the report is told, whatever becomes of the picture
        from fiddlex.simulate.plots import save
        from fiddlex.xla.memory_plot import draw

        save(draw(ahead.memory_use), plot, format=plot.suffix[1:])


def _check_plot(plot: pathlib.Path) -> None:
    """Raises ConfigError where the picture could not be written once the step is compiled."""
    if not _MEMORY.value:
        raise ConfigError(f"--plot={plot} without --memory: it changes nothing. Add --memory, or leave it out.")
    if plot.suffix not in (".svg", ".png"):
        raise ConfigError(f"--plot={plot}: the name of a picture ends in .svg or .png.")
    import fiddlex.simulate.plots  # noqa: F401  # raises ConfigError without matplotlib

    check_output("--plot", plot)


def host_facts(config: Config, topology: str, host: HostMemory | None, *, planned: int | None) -> dict[str, Any]:
    """What a device's arrays take in the memory of its host, and what there is; None: not known.

    Args:
      config: the config.
      topology: what the step was compiled for.
      host: the memory of a host there; None: not known.
      planned: the bytes that XLA has planned there; None where it gave no figure.

    Returns:
      `host_predicted_bytes`; `host_needed_bytes`, those that XLA has planned, else those predicted;
      `host_limit_bytes`; and `host_limit_is_pinned_gib`, whether the limit is that of pinned memory.
    """
    from fiddlex.costs.backend import backend_for
    from fiddlex.planner.predict import needed_memory

    predicted = needed_memory(config, backend_for(topology)).of_host
    return {
        "host_predicted_bytes": predicted,
        "host_needed_bytes": predicted if planned is None else planned,
        "host_limit_bytes": host.limit if host else None,
        "host_limit_is_pinned_gib": host is not None and host.limit < host.bytes_per_device,
    }
