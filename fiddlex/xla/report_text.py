"""The text of the report on a train step that was compiled ahead of time (`fiddlex.xla.ahead_of_time.report`)."""

from typing import Any

from fiddlex.config import Config
from fiddlex.hardware.compilers import other_libtpu
from fiddlex.terminal.memory_advice import memory_remedies
from fiddlex.terminal.readable import counted, mib, readable_size, readable_time

_MEMORY = {
    "argument": "train state (unless flushed, also versions of the weights, stash and sums) and batch",
    "output": "train state and metrics",
    "alias": "of the output, in the place of arguments",
    "temp": "all else: compute weights, gradients, stash, workspace",
    "peak": "all together",
    "host": "in the memory of the host",
}


def report_text(facts: dict[str, Any], config: Config, devices: str) -> str:
    """The report for people; `devices` describes the mesh."""
    semantics, slots = facts["semantics"].items(), facts["host_stash_slots"]
    on_host = f" and {slots} more on its host" if slots else ""
    streamed = f", {facts['chunks_held']}" if facts["chunks_held"] else ""
    going_on = "".join(f"{name}: {ticks:g} ticks a batch\n" for name, ticks in semantics if name != "sync")
    libtpu = facts["libtpu_version"]
    note = other_libtpu(libtpu, facts["libtpu_version_named_by_jax"]) if libtpu else ""
    order = f"pipeline.order={config.pipeline.order}: {facts['order_text']}\n" if facts["order_text"] else ""
    lines = [
        f"{facts['num_parameters']:,} parameters, {devices}\n"
        f"schedule {facts['schedule']}: {counted(facts['num_stages'], 'stage')}, "
        f"{counted(facts['num_microbatches'], 'microbatch', 'microbatches')} of {facts['microbatch_size']}, "
        f"{counted(facts['num_ticks'], 'tick')}, a stash for {facts['stash_slots']} "
        f"forward passes of a stage{on_host}{streamed}\n"
        f"{order}{going_on}"
        f"{facts['attention']}\n"
        f"a step needs {facts['model_flops']:.3e} floating-point operations, not counting recomputation\n"
        f"traced in {readable_time(facts['trace_s'])}, compiled in {readable_time(facts['compile_s'])} by jax "
        f"{facts['jax_version']}{f' and libtpu {libtpu}' if libtpu else ''}\n"
        f"{host_shortage(facts)}{_verdict(facts, config)}{_host_verdict(facts)}",
        *facts["unused"],
        *([note] if note else []),
    ]
    if facts["collectives"] is not None:
        lines += [_memory_table(facts), _collectives_table(facts["collectives"])]
        lines += host_copies_lines(facts["host_copies"])
        if facts["num_granules"] > 1:
            lines.append(_crossing_table(facts["crossing"], facts["num_granules"]))
    if "memory_parts" in facts:
        lines.append(_parts_table(facts["memory_parts"]))
    return "\n".join(lines)


def _verdict(facts: dict[str, Any], config: Config) -> str:
    needed, limit = (
        readable_size(size) if size else "" for size in (facts["needed_bytes"], facts["memory_limit_bytes"])
    )
    if facts["fits"]:
        return f"fits: {needed} of the {limit} of a {facts['device_kind']}"
    if facts["fits"] is None:
        return f"whether it fits is not known, since the memory of a {facts['device_kind']} is not known"
    sizes = f"{needed} needed, {limit} there on a {facts['device_kind']}" if needed else facts["reason"]
    remedies = ", or ".join(memory_remedies(config, fake=False))
    return f"does not fit: {sizes}. What may help: {remedies}."


def lacks_host(facts: dict[str, Any]) -> bool:
    return facts["host_limit_bytes"] is not None and facts["host_needed_bytes"] > facts["host_limit_bytes"]


def host_shortage(facts: dict[str, Any]) -> str:
    """A line for people where the memory of the host is too small, else empty."""
    if not lacks_host(facts):
        return ""
    needed, limit = (readable_size(facts[f"host_{name}_bytes"]) for name in ("needed", "limit"))
    pinned = (
        " as pinned memory (pinned_gib of the topology's file; set it in a file of your own if the processes that "
        "train have another XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB)"
    )
    return (
        f"does not fit the memory of the host: {needed} needed, {limit} there for each device"
        f"{pinned if facts['host_limit_is_pinned_gib'] else ''}. What may help: more devices, along data with "
        "optimizer.zero1=True, along pipe or along tensor. The device:\n"
    )


def _host_verdict(facts: dict[str, Any]) -> str:
    """What each device keeps in the memory of its host, of what there is; empty where it keeps nothing."""
    needed, limit = facts["host_needed_bytes"], facts["host_limit_bytes"]
    if not needed:
        return ""
    there = f" of the {readable_size(limit)} for each device" if limit else "; how much there is, is not known"
    return f"; in the memory of the host: {readable_size(needed)}{there}" if not lacks_host(facts) else ""


def _memory_table(facts: dict[str, Any]) -> str:
    lines = ["memory of each device:"]
    for name, meaning in _MEMORY.items():
        size = facts[f"{name}_bytes"]
        if name == "host":
            if not size:
                continue
            meaning += f", predicted {mib(facts['host_predicted_bytes'])} MiB"
        lines.append(f"  {name:<9} {'not told' if size is None else f'{mib(size)} MiB':>14}  {meaning}")
    return "\n".join(lines)


def _parts_table(parts: dict[str, dict[str, int | None]]) -> str:
    lines = ["memory of each device where most is in use:", f"  {'part':<16} {'predicted, MiB':>14} {'found, MiB':>12}"]
    for part, sizes in parts.items():
        predicted, found = ("not told" if size is None else mib(size) for size in sizes.values())
        lines.append(f"  {part:<16} {predicted:>14} {found:>12}")
    return "\n".join(lines)


def _collectives_table(collectives: list[dict[str, Any]]) -> str:
    """Adds up the collectives of one kind along one axis, those with work beside them apart."""
    if not collectives:
        return "no collectives"
    groups: dict[tuple[str, str, bool], list[tuple[int, float | None]]] = {}
    for each in collectives:
        key = each["kind"], each["axis"] or "?", each["overlapped"]
        groups.setdefault(key, []).append((each["bytes"], each["count"]))
    lines = [
        "collectives of each device in a step:",
        f"  {'kind':<20} {'axis':<8} {'times':>9} {'MiB in all':>12}  work beside it",
    ]
    for (kind, axis, overlapped), sizes in sorted(groups.items()):
        times = sum(count or 0 for _, count in sizes)
        size = sum(one * (count or 0) for one, count in sizes)
        at_least = "" if all(count is not None for _, count in sizes) else ">="
        many, much = f"{at_least}{times:,g}", f"{at_least}{mib(size)}"
        lines.append(f"  {kind:<20} {axis:<8} {many:>9} {much:>12}  {'yes' if overlapped else 'no'}")
    return "\n".join(lines)


def host_copies_lines(copies: list[dict[str, Any]]) -> list[str]:
    """Lines on the asynchronous copies between a device and its host, for each direction in which there are any."""
    title = "asynchronous copies of each device, each counted once although loops repeat it:"
    lines = [title] if copies else []
    for to_host, where in ((True, "to the host"), (False, "from the host")):
        some = [each for each in copies if each["to_host"] == to_host]
        for beside, how in ((True, "while matrix products run"), (False, "while none runs")):
            sizes = [each["bytes"] for each in some if bool(each["products"]) == beside]
            if sizes:
                lines.append(f"  {where:<14} {len(sizes):>4} copies {mib(sum(sizes)):>10} MiB  {how}")
    return lines


def _crossing_table(crossing: list[dict[str, Any]], num_granules: int) -> str:
    lines = [f"what the device that sends most to others of {num_granules} slices or hosts sends there in a step:"]
    for each in sorted(crossing, key=lambda each: -each["bytes"]):
        lines.append(f"  {each['kind']:<20} {each['axis'] or '?':<8} {mib(each['bytes']):>12} MiB")
    return "\n".join(lines if crossing else ["nothing crosses from one slice or host to another"])
