"""Compiles a config's train step ahead of time, without data or state, and reports what XLA plans for it."""

import contextlib
import dataclasses
import pathlib
import re
import tempfile
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fiddlex.cluster.mesh import granules
from fiddlex.cluster.program_cache import compiled_anew
from fiddlex.config import Config
from fiddlex.config.unused import unused_fields
from fiddlex.costs.sizes import model_flops, num_parameters
from fiddlex.hardware.compilers import libtpu_that_jax_names, libtpu_version
from fiddlex.hardware.topology import gpu_targets
from fiddlex.models.flash import kernel_on
from fiddlex.schedules.table import NONE
from fiddlex.schedules.text import order_to_text
from fiddlex.schedules.ticks import order_facts
from fiddlex.terminal.progress import phase
from fiddlex.train.step.program import Program
from fiddlex.train.step.state import WeightLayout
from fiddlex.xla.compiled_collectives import Collective, collectives, crossings
from fiddlex.xla.device_groups import Places
from fiddlex.xla.host_copies import host_copies
from fiddlex.xla.peak_memory import MemoryUse
from fiddlex.xla.peak_memory import read as read_memory

_SIZE = re.compile(r"\b(\d+(?:\.\d+)?)([KMGT])\b")  # matches `33.19G`
_UNITS = {unit: 2 ** (10 * power) for power, unit in enumerate("KMGT", 1)}


class Shortage(NamedTuple):
    """The compiler's message about a step that does not fit into device memory."""

    needed_bytes: int | None  # device memory that the step needs; None when the message does not say
    limit_bytes: int | None  # device memory that is available; None when the message does not say
    reason: str  # the text of the message


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A train step, compiled if it fits."""

    program: Program
    # the step for the devices of the program's mesh; None when it does not fit their memory
    compiled: jax.stages.Compiled | None
    text: str  # the scheduled program as XLA prints it; empty when `compiled` is None
    shortage: Shortage | None  # why the step does not fit; None when it was compiled
    memory_use: MemoryUse | None  # what fills the memory, if asked for and if XLA assigned buffers
    trace_s: float  # seconds from Python to XLA's input
    compile_s: float  # seconds in XLA


def compile_ahead(config: Config, mesh: Mesh, *, reads_memory: bool = False) -> CompiledStep:
    """Compiles the train step of a validated config for a mesh whose devices need not exist.

    With `reads_memory`, the result also has what fills the memory.

    Raises:
      ConfigError, ScheduleError: when layers, stages or schedule do not fit the mesh.
      DeviceError: when the compiler fails for any other reason than too little memory.
    """
    start = time.monotonic()
    with phase("Building the model"):
        program = Program(config, mesh)
    with phase("Tracing the train step"):
        lowered = program.lower()
    traced = time.monotonic()
    compiled, shortage, text = None, None, ""
    is_tpu = mesh.devices.flat[0].platform == "tpu"
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, object] = {}
        if is_tpu or reads_memory:  # jaxlib cannot read the programs of a libtpu newer than itself
            options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        try:
            anew = compiled_anew() if reads_memory else contextlib.nullcontext()
            with anew, phase("Compiling the train step"):
                compiled = program.compile(lowered, **options)
        except jax.errors.JaxRuntimeError as error:  # too little memory
            shortage = read_shortage(str(error))
        compile_s = time.monotonic() - traced
        if compiled is not None:
            text = (_dumped(folder, "after_codegen") if is_tpu else "") or compiled.as_text() or ""
        names = "after_optimizations", "after_optimizations-buffer-assignment", "after_optimizations-live-range"
        reports = [_dumped(folder, name) for name in names] if reads_memory else []
        memory_use = read_memory(*reports) if all(reports) and reports else None
    return CompiledStep(program, compiled, text, shortage, memory_use, traced - start, compile_s)


def _dumped(folder: str, report: str) -> str:
    """One of XLA's reports on the step, from its dump in `folder`; empty when XLA has not written it."""
    files = list(pathlib.Path(folder).glob(f"*.jit_step.*{report}.txt"))
    return files[0].read_text(encoding="utf-8") if files else ""


def read_shortage(message: str) -> Shortage:
    """Parses XLA's message of too little memory, which may give first the bytes needed, then those available."""
    reason = message.splitlines()[0].removeprefix("RESOURCE_EXHAUSTED: ")
    sizes = [round(float(number) * _UNITS[unit]) for number, unit in _SIZE.findall(reason)]
    if "hbm" not in reason.lower() or len(sizes) < 2:  # not the device's main memory
        return Shortage(None, None, reason)
    return Shortage(sizes[0], sizes[1], reason)


def memory_limit(mesh: Mesh) -> int | None:
    """Bytes of each device's memory that the compiler allows a program; None where no limit is known.

    For a TPU, the function compiles a program that fits on no device and reads the limit from the compiler's error. For
    a GPU, the limit is all of the device's memory, although the driver and XLA's own libraries take some of it.
    """
    device = mesh.devices.flat[0]
    if device.platform == "gpu":
        targets = gpu_targets().values()
        return next((target.memory_bytes for target in targets if target.description == device.device_kind), None)
    if device.platform != "tpu":
        return None
    everywhere = NamedSharding(mesh, P())
    too_large = jax.ShapeDtypeStruct((2**20, 2**20), jnp.float32)
    try:
        jax.jit(jnp.negative, in_shardings=everywhere, out_shardings=everywhere).lower(too_large).compile()
    except jax.errors.JaxRuntimeError as error:
        return read_shortage(str(error)).limit_bytes
    return None


def memory(compiled: jax.stages.Compiled | None) -> dict[str, int | None]:
    """The bytes of each device's memory that XLA has planned for a program; None where XLA gives no figure.

    Returns:
      `argument_bytes` and `output_bytes` (for the train step: state and batch, state and metrics); `alias_bytes`
      (outputs that reuse the memory of arguments); `temp_bytes` (everything else that the program holds);
      `peak_bytes` (all of it together); and `host_bytes` (what it holds in the memory of the host). The peak is XLA's
      figure, but at least argument + output − alias + temp, because XLA's CPU backend leaves the temporaries out of
      its figure. Where something is on the host, the peak is this sum, because XLA's figure then includes the host.
    """
    analysis = compiled.memory_analysis() if compiled is not None else None
    names = ("argument_bytes", "output_bytes", "alias_bytes", "temp_bytes", "peak_bytes", "host_bytes")
    if analysis is None:
        return dict.fromkeys(names)
    argument, output = analysis.argument_size_in_bytes, analysis.output_size_in_bytes
    alias, temp = analysis.alias_size_in_bytes, analysis.temp_size_in_bytes
    peak, host = argument + output - alias + temp, _host_bytes(analysis)
    if not host:
        peak = max(analysis.peak_memory_in_bytes, peak)
    return dict(zip(names, (argument, output, alias, temp, peak, host), strict=True))


def _host_bytes(analysis: Any) -> int:
    kept = analysis.host_argument_size_in_bytes + analysis.host_output_size_in_bytes - analysis.host_alias_size_in_bytes
    return int(kept + analysis.host_temp_size_in_bytes)


def report(config: Config, ahead: CompiledStep) -> dict[str, Any]:
    """The report on a train step: sizes, schedule, memory of one device, collectives, and compile times.

    `num_granules` is the number of TPU slices or GPU hosts. `needed_bytes` is the peak, or the compiler's figure for a
    step that does not fit. `fits` says whether `needed_bytes` is within `memory_limit_bytes`; it is None where no limit
    is known. `model_flops` are the FLOPs of a step on all devices. `unused` has a sentence for each field of the config
    that changes nothing. `crossing` says what the device that sends most to other slices or hosts sends there
    (`Crossing`). For a step that was not compiled, `crossing`, `collectives` (`Collective`), `host_copies` (`HostCopy`)
    and the parts of its memory are None.
    """
    layout, mesh = ahead.program.layout, ahead.program.mesh
    is_tpu = mesh.devices.flat[0].platform == "tpu"
    pipeline, parts = layout.pipeline, memory(ahead.compiled)
    lowered = pipeline.lowered
    if ahead.shortage is None:
        needed, limit = parts["peak_bytes"], memory_limit(mesh)
        fits = None if needed is None or limit is None else needed <= limit
    else:
        needed, limit, fits = ahead.shortage.needed_bytes, ahead.shortage.limit_bytes, False
    where = places(mesh)
    found = collectives(ahead.text, where, runs(layout)) if ahead.text else None
    return {
        "device_kind": mesh.devices.flat[0].device_kind,
        "num_devices": config.mesh.num_devices,
        "num_granules": len(set(where.granules)),
        "mesh": dict(mesh.shape),
        "attention": str(kernel_on(mesh, config, dropout=config.model.dropout > 0)),
        "num_parameters": num_parameters(config),
        "model_flops": model_flops(config),
        "schedule": config.pipeline.schedule,
        "num_stages": lowered.schedule.num_stages,
        "num_microbatches": config.pipeline.num_microbatches,
        "microbatch_size": config.microbatch_size,
        "num_ticks": lowered.num_ticks,
        **order_facts(lowered.schedule, lowered.ticks),
        "order_text": order_to_text(lowered, "pipeline.order"),
        "semantics": {name: windows.period for name, windows in pipeline.windows.items()}
        or {"sync": lowered.num_ticks},
        "stash_slots": lowered.stash_slots,
        "host_stash_slots": lowered.host_stash_slots,
        "chunks_held": pipeline.stream and pipeline.stream.held_text(lowered.schedule.num_chunks),
        "unused": unused_fields(
            config, host_stash_slots=pipeline.spec.sizes.slots.host_stash, has_whole=pipeline.spec.has_whole
        ),
        "fits": fits,
        "needed_bytes": needed,
        "memory_limit_bytes": limit,
        "reason": ahead.shortage and ahead.shortage.reason,
        **parts,
        "collectives": None if found is None else [_facts(each) for each in found],
        "host_copies": [dataclasses.asdict(each) for each in host_copies(ahead.text)] if ahead.text else None,
        "crossing": None if found is None else [each._asdict() for each in crossings(found)],
        "trace_s": round(ahead.trace_s, 3),
        "compile_s": round(ahead.compile_s, 3),
        "jax_version": jax.__version__,
        "libtpu_version": libtpu_version() if is_tpu else None,
        "libtpu_version_named_by_jax": libtpu_that_jax_names() if is_tpu else None,
    }


def _facts(collective: Collective) -> dict[str, Any]:
    """A collective as a JSON object; `crossing_bytes` are those of the device that sends most."""
    sent = collective.crossing_bytes
    return {**dataclasses.asdict(collective), "crossing_bytes": None if sent is None else round(float(sent.max()))}


def places(mesh: Mesh) -> Places:
    devices = list(mesh.devices.flat)
    return Places(dict(mesh.shape), granules(devices), [device.id for device in devices])


def runs(layout: WeightLayout) -> dict[str, float]:
    """How often a step runs each scope that the executor or the update names, on the rank that runs it most.

    `collectives` takes these numbers. A slot of a tick runs once for each layer of its chunk.
    """
    lowered, placement = layout.pipeline.lowered, layout.placement
    sizes = np.asarray(placement.chunk_sizes())  # [rank, chunk]
    ranks = np.arange(len(sizes))
    whole = lowered.column("backward_left") == NONE

    def busiest(column: str) -> int:
        return int((lowered.column(column) != NONE).sum(axis=0).max())

    def layers(column: str, among: np.ndarray | bool = True) -> int:
        chunks = lowered.column(column)  # [tick, rank]
        return int(np.where((chunks != NONE) & among, sizes[ranks, chunks], 0).sum(axis=0).max())

    return {
        "embed": busiest("embed"),
        "forward": layers("forward_chunk"),
        "head": busiest("head"),
        "backward": layers("backward_chunk", whole),
        "input_only": layers("backward_chunk", ~whole),
        "embed_backward": busiest("embed_backward"),
        "weights": layers("weight_chunk"),
        "backward_finish": busiest("backward_finishes") * placement.rows_per_chunk,
        "weight_finish": busiest("weight_finishes") * placement.rows_per_chunk,
        "map_whole": 1,
        "periods": len(layout.pipeline.stream.loads) if layout.pipeline.stream else 0,
        "ticks": max((windows.period for windows in layout.pipeline.windows.values()), default=lowered.num_ticks),
    }
