"""Compiles the train step of a config ahead of time and reports its costs; trains nothing and reads no data.

    fiddlex compile --config=gpt_tiny [--topology=tpu:v5e:2x2 --memory --format=json …]

The machine need not have the devices. Any field of the config can be overridden, as for `fiddlex train`. A step that
does not fit its devices' memory is a result like any other. `--memory` tells what fills the memory at its peak, beside
what was predicted, and `--plot=FILE` draws it over the program. The report also tells the bytes that a run keeps in the
memory of hosts. docs/ahead_of_time.md explains the figures.
"""

import json
import pathlib
from typing import Any

from absl import flags

from fiddlex.cluster.host_memory import HostMemory
from fiddlex.cluster.topology import catalogue, host_for, load_topology
from fiddlex.config import Config
from fiddlex.config.command_line import define_config
from fiddlex.config.memory_advice import memory_remedies
from fiddlex.config.whole_files import check_replaceable
from fiddlex.errors import ConfigError

_CONFIG = define_config()
_TOPOLOGY = flags.DEFINE_string(
    "topology",
    "cpu",
    "what to compile for: cpu, TPUs as tpu:NAME:SHAPE or tpu:NAME:SHAPE:SLICES (tpu:v5e:2x4, tpu:v5e:2x4:2; takes the "
    "extra aot), GPUs as "
    "gpu:NAME:HOSTSxPER_HOST (gpu:h100:2x8; takes the extra aot-gpu), or as many devices as the mesh has of a topology "
    "as `fiddlex plan` takes it (a100_80, or a .toml file)",
)
_FORMAT = flags.DEFINE_enum("format", "text", ["text", "json"], "json: one JSON object last on standard output")
_MEMORY = flags.DEFINE_bool("memory", False, "tells what fills the memory at its peak, beside the prediction")
_PLOT = flags.DEFINE_string(
    "plot", None, "with --memory: a picture of the memory over the program, FILE.svg or FILE.png"
)

MEMORY = {
    "argument": "train state (unless flushed, also versions of the weights, stash and sums) and batch",
    "output": "train state and metrics",
    "alias": "of the output, in the place of arguments",
    "temp": "all else: compute weights, gradients, stash, workspace",
    "peak": "all together",
    "host": "in the memory of the host: of the train state with optimizer.offload, and of the stash",
}


def main(argv: list[str]) -> None:
    """Prints the report."""
    config = _CONFIG.value.validate()
    plot = pathlib.Path(_PLOT.value) if _PLOT.value is not None else None
    if plot is not None:
        _check_plot(plot)

    from fiddlex.cluster.mesh import (  # jax is imported only after the command line has been checked
        describe,
        make_topology_mesh,
    )
    from fiddlex.xla.ahead_of_time import compile_ahead, report
    from fiddlex.xla.peak_memory import memory_parts

    topology = _TOPOLOGY.value
    if topology in catalogue() or topology.endswith(".toml"):
        loaded = load_topology(topology)
        topology, host = loaded.compile_name(config.mesh.num_devices), loaded.host
    else:
        host = host_for(topology)
    mesh = make_topology_mesh(config.mesh, topology)
    ahead = compile_ahead(config, mesh, reads_memory=_MEMORY.value)
    facts = {"topology": topology, **report(config, ahead), **host_facts(config, topology, host)}
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


def report_text(facts: dict[str, Any], config: Config, devices: str) -> str:
    """The report for people; `devices` describes the mesh."""
    semantics = facts["semantics"].items()
    going_on = "".join(f"{name}: {ticks:g} ticks a batch\n" for name, ticks in semantics if name != "sync")
    lines = [
        f"{facts['num_parameters']:,} parameters, {devices}\n"
        f"schedule {facts['schedule']}: {facts['num_stages']} stages, {facts['num_microbatches']} microbatches of "
        f"{facts['microbatch_size']}, {facts['num_ticks']} ticks, a stash for {facts['stash_slots']} "
        "forward passes of a stage\n"
        f"{going_on}"
        f"{facts['attention']}\n"
        f"a step needs {facts['model_flops']:.3e} floating-point operations, nothing recomputed\n"
        f"traced in {facts['trace_s']:.1f} s, compiled in {facts['compile_s']:.1f} s by jax {facts['jax_version']}\n"
        f"{host_shortage(facts)}{verdict(facts, config)}{host_verdict(facts)}"
    ]
    if facts["collectives"] is not None:
        lines += [memory_table(facts), collectives_table(facts["collectives"])]
        lines += host_copies_lines(facts["host_copies"])
        if facts["num_granules"] > 1:
            lines.append(crossing_table(facts["crossing"], facts["num_granules"]))
    if "memory_parts" in facts:
        lines.append(parts_table(facts["memory_parts"]))
    return "\n".join(lines)


def _check_plot(plot: pathlib.Path) -> None:
    """Raises ConfigError where the picture could not be written once the step is compiled."""
    if not _MEMORY.value:
        raise ConfigError(f"--plot={plot} without --memory: it changes nothing. Add --memory, or leave it out.")
    if plot.suffix not in (".svg", ".png"):
        raise ConfigError(f"--plot={plot}: the name of a picture ends in .svg or .png.")
    import fiddlex.simulate.plots  # noqa: F401  # raises ConfigError without matplotlib

    reason = "it is a link to nothing" if plot.is_symlink() and not plot.exists() else None
    try:
        check_replaceable(plot)
    except OSError as error:
        reason = error.strerror
    if reason:
        raise ConfigError(f"--plot={plot} cannot be written: {reason}. Name a file in a folder that you may write to.")


def verdict(facts: dict[str, Any], config: Config) -> str:
    """Whether the step fits a device, and if not, what to do."""
    needed, limit = (
        f"{size / 2**30:.2f} GiB" if size else "" for size in (facts["needed_bytes"], facts["memory_limit_bytes"])
    )
    if facts["fits"]:
        return f"fits: {needed} of the {limit} of a {facts['device_kind']}"
    if facts["fits"] is None:
        return f"whether it fits is not known: how much memory a {facts['device_kind']} has is not told"
    sizes = f"{needed} needed, {limit} there on a {facts['device_kind']}" if needed else facts["reason"]
    remedies = ", or ".join(memory_remedies(config, fake=False))
    return f"does not fit: {sizes}. What may help: {remedies}."


def host_facts(config: Config, topology: str, host: HostMemory | None) -> dict[str, int | None]:
    """What a device's part of the train state takes in the memory of its host, and what there is; None: not known."""
    from fiddlex.costs.backend import backend_for
    from fiddlex.planner.predict import needed_memory

    return {
        "host_needed_bytes": needed_memory(config, backend_for(topology)).of_host,
        "host_limit_bytes": host.limit if host else None,
    }


def lacks_host(facts: dict[str, Any]) -> bool:
    """Whether the memory of the host is known to be too small."""
    return facts["host_limit_bytes"] is not None and facts["host_needed_bytes"] > facts["host_limit_bytes"]


def host_shortage(facts: dict[str, Any]) -> str:
    """A line for people where the memory of the host is too small, else empty."""
    if not lacks_host(facts):
        return ""
    needed, limit = (facts[f"host_{name}_bytes"] / 2**30 for name in ("needed", "limit"))
    return (
        f"does not fit the memory of the host: {needed:.2f} GiB needed, {limit:.2f} GiB there for each device. What "
        "may help: more devices, along data with optimizer.zero1=True, along pipe or along tensor. The device:\n"
    )


def host_verdict(facts: dict[str, Any]) -> str:
    """What each device keeps in the memory of its host, of what there is; empty where it keeps nothing."""
    needed, limit = facts["host_needed_bytes"], facts["host_limit_bytes"]
    if not needed:
        return ""
    there = f" of the {limit / 2**30:.2f} GiB for each device" if limit else ", and how much there is is not told"
    return f"; in the memory of the host: {needed / 2**30:.2f} GiB{there}" if not lacks_host(facts) else ""


def memory_table(facts: dict[str, Any]) -> str:
    """The lines of the table of a device's memory."""
    lines = ["memory of each device:"]
    for name, meaning in MEMORY.items():
        size = facts[f"{name}_bytes"]
        if name == "host" and not size:
            continue
        lines.append(f"  {name:<9} {'not told' if size is None else f'{size / 1e6:,.1f} MB':>14}  {meaning}")
    return "\n".join(lines)


def parts_table(parts: dict[str, dict[str, int | None]]) -> str:
    """The lines of the table of the parts of a device's memory."""
    lines = ["memory of each device where most is in use:", f"  {'part':<16} {'predicted, MB':>14} {'found, MB':>12}"]
    for part, sizes in parts.items():
        predicted, found = ("not told" if size is None else f"{size / 1e6:,.1f}" for size in sizes.values())
        lines.append(f"  {part:<16} {predicted:>14} {found:>12}")
    return "\n".join(lines)


def collectives_table(collectives: list[dict[str, Any]]) -> str:
    """The lines of the table of collectives, which adds up collectives of one kind along one axis."""
    if not collectives:
        return "no collectives"
    groups: dict[tuple[str, str, bool], list[tuple[int, float | None]]] = {}
    for each in collectives:
        key = each["kind"], each["axis"] or "?", each["overlapped"]
        groups.setdefault(key, []).append((each["bytes"], each["count"]))
    lines = [
        "collectives of each device in a step:",
        f"  {'kind':<20} {'axis':<8} {'times':>9} {'MB in all':>12}  work beside it",
    ]
    for (kind, axis, overlapped), sizes in sorted(groups.items()):
        times = sum(count or 0 for _, count in sizes)
        size = sum(one * (count or 0) for one, count in sizes)
        at_least = "" if all(count is not None for _, count in sizes) else ">="
        many, much = f"{at_least}{times:,g}", f"{at_least}{size / 1e6:,.1f}"
        lines.append(f"  {kind:<20} {axis:<8} {many:>9} {much:>12}  {'yes' if overlapped else 'no'}")
    return "\n".join(lines)


def host_copies_lines(copies: list[dict[str, Any]]) -> list[str]:
    """Lines on the asynchronous copies between a device and its host, one for each direction in which there are any."""
    lines = []
    for to_host, where in ((True, "to the host"), (False, "from the host")):
        some = [each for each in copies if each["to_host"] == to_host]
        if some:
            size, least = sum(each["bytes"] for each in some), min(each["products"] for each in some)
            lines.append(f"{len(some)} copies {where}, {size / 1e6:,.1f} MB, each beside {least} products or more")
    return lines


def crossing_table(crossing: list[dict[str, Any]], num_granules: int) -> str:
    """The lines of the table of what crosses from one slice or host to another."""
    lines = [f"what the device that sends most to others of {num_granules} slices or hosts sends there in a step:"]
    for each in sorted(crossing, key=lambda each: -each["bytes"]):
        lines.append(f"  {each['kind']:<20} {each['axis'] or '?':<8} {each['bytes'] / 1e6:>12,.1f} MB")
    return "\n".join(lines if crossing else ["nothing crosses from one slice or host to another"])
