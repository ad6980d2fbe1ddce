"""The results of a study on a device, as Markdown."""

import json
from collections.abc import Sequence
from typing import Any

from experiments.benchmarks.comparison import between
from experiments.on_device.sizes import SIZES
from experiments.on_device.study import Record

NOT_MEASURED = "not measured"
WANTED = [(name, seq_len) for name in ("small", "1.3b") for seq_len in SIZES[name].microbatch_sizes]
SYSTEMS = ("fiddlex", "nanogpt-compile")  # rows of the table, measured or not
_SIZES_HEADER = (
    "| model | sequence | system | tokens/s | step, s | middle half of turns | MFU | memory predicted, GB | by XLA, GB "
    "| allocated, GB | largest relative loss difference from float32 |\n"
    "|---|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|"
)
_KERNELS_HEADER = (
    "| attention | kernel | y, dq, dk, dv of the kernel | of all scores in the same dtype | |\n|---|---|---|---|---|"
)
_TESTS_HEADER = "| tests | passed | failed | skipped | s |\n|---|---:|---:|---:|---:|"


def document(records: Sequence[Record]) -> str:
    """All results, for each machine that has some."""
    machines = {json.dumps(record["machine"], sort_keys=True): record["machine"] for record in records}
    parts = [
        _of_machine(machine, [record for record in records if record["machine"] == machine])
        for machine in machines.values()
    ]
    return "\n\n".join(parts) + "\n"


def _of_machine(machine: Record, records: Sequence[Record]) -> str:
    dates = sorted({record["date"] for record in records})
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    about = [
        f"## {machine['device_kind']}",
        f"{machine['driver'] or 'no GPU'}; {machine['cores']} cores; {versions}",
    ]
    systems = {system["versions"]: None for record in records for system in record.get("systems", [])}
    about += [f"Measured from {dates[0]} to {dates[-1]}. {'; '.join(systems)}"]
    is_gpu = machine["platform"] == "gpu"
    tables = [sizes_table(records, WANTED if is_gpu else []), kernels_table(records), tests_table(records)]
    return "\n\n".join([*about, *filter(None, tables), *_troubles(records)])


def latest(records: Sequence[Record], stage: str) -> dict[str, Record]:
    """The last result of each part of a stage."""
    return {record["name"]: record for record in records if record["stage"] == stage}


def sizes_table(records: Sequence[Record], wanted: Sequence[tuple[str, int]], dtype: str = "bfloat16") -> str:
    """Speed and memory.

    Args:
      records: results.
      wanted: sizes and lengths that have rows for each of `SYSTEMS` in `dtype` even where nothing is measured.
      dtype: the dtype of `wanted`.
    """
    speed, memory = latest(records, "speed"), latest(records, "memory")
    names = dict.fromkeys([*(f"{name} {seq_len} {dtype}" for name, seq_len in wanted), *speed, *memory])
    rows = []
    for name in names:
        systems = {system["name"]: system for system in speed.get(name, {}).get("systems", [])}
        is_wanted = name in [f"{size} {seq_len} {dtype}" for size, seq_len in wanted]
        for system in dict.fromkeys([*(SYSTEMS if is_wanted else SYSTEMS[:1]), *systems]):
            rows.append(_row(name, system, systems.get(system), memory.get(name, {})))
    return "\n".join([_SIZES_HEADER, *rows]) if rows else ""


def _row(name: str, system: str, result: Record | None, memory: Record) -> str:
    size, seq_len, dtype = name.split()
    cells = [f"{SIZES[size].label}, {dtype}", f"{int(seq_len):,}", system]
    if result is None:
        cells += [NOT_MEASURED] * 4
    else:
        cells += [f"{result['tokens_per_second']:,.0f}", f"{result['step_time_s']:.4g}"]
        cells += [between(result["quartiles_s"]), _or_dash(result["mfu"], lambda mfu: f"{mfu:.1%}")]
    if system == "fiddlex":
        cells += [_gigabytes(memory.get("predicted_bytes")), _gigabytes(memory.get("xla_bytes"))]
    else:
        cells += ["–", "–"]
    if result is None:
        cells += [NOT_MEASURED] * 2
    else:
        cells += [_or_dash(result["peak_bytes"], _gigabytes)]
        cells += [_or_dash(result["from_float32"], lambda apart: f"{apart:.1e}")]
    return f"| {' | '.join(cells)} |"


def _gigabytes(size: int | None) -> str:
    return NOT_MEASURED if size is None else f"{size / 1e9:.3g}"


def _or_dash(value: Any, text: Any) -> str:
    return "–" if value is None else text(value)


def kernels_table(records: Sequence[Record]) -> str:
    """Relative differences of y, dq, dk and dv from attention that computes all scores in float32."""
    rows = []
    for name, record in latest(records, "flash").items():
        if "kernel_errors" in record:
            errors = (", ".join(f"{each:.1e}" for each in record[key]) for key in ("kernel_errors", "open_errors"))
            rows.append(f"| {name} | {record['kernel']} | {' | '.join(errors)} | {record.get('error', 'near')} |")
        else:
            rows.append(f"| {name} | – | – | – | {record.get('skipped', record.get('error'))} |")
    return "\n".join([_KERNELS_HEADER, *map(_one_line, rows)]) if rows else ""


def tests_table(records: Sequence[Record]) -> str:
    """Numbers of tests."""
    rows = [
        f"| {name} | {record.get('passed', '–')} | {record.get('failed', '–')} | {record.get('skipped', '–')} | "
        f"{record['seconds']:,.0f} |"
        for name, record in latest(records, "tests").items()
    ]
    return "\n".join([_TESTS_HEADER, *rows]) if rows else ""


def _troubles(records: Sequence[Record]) -> list[str]:
    """What failed and what is missing, a line each."""
    lines = []
    for stage in ("speed", "memory", "flash", "tests"):
        for name, record in latest(records, stage).items():
            found = [record["error"]] if "error" in record else []
            found += [f"{system} is left out: {why}" for system, why in record.get("missing", {}).items()]
            found += [f"skipped: {why}" for why in record.get("reasons", [])]
            lines += [f"- {stage}, {name}: {each}" for each in found]
    return ["\n".join(map(_one_line, lines))] if lines else []


def _one_line(text: str) -> str:
    return " ".join(text.split())
