"""Compiles a config's train step ahead of time and tells what XLA says of it: no data is read, no state is made."""

import dataclasses
import time
from typing import Any

import jax
from jax.sharding import Mesh

from fiddlex.advice import memory_remedies
from fiddlex.config import Config
from fiddlex.errors import DeviceError
from fiddlex.sizes import num_parameters
from fiddlex.train.program import Program


@dataclasses.dataclass(frozen=True)
class Ahead:
    """A compiled train step.

    Attributes:
      program: what was compiled.
      compiled: for the devices of its mesh.
      trace_s: seconds from Python to XLA's input.
      compile_s: seconds in XLA.
    """

    program: Program
    compiled: jax.stages.Compiled
    trace_s: float
    compile_s: float


def compile_ahead(config: Config, mesh: Mesh) -> Ahead:
    """Compiles the train step of a validated config for a mesh, of which no device has to be there.

    Raises:
      ConfigError, ScheduleError: when layers, stages or schedule do not fit the mesh.
      DeviceError: when the compiler finds that the step does not fit the memory of the mesh's devices.
    """
    start = time.monotonic()
    program = Program(config, mesh)
    lowered = program.lower()
    traced = time.monotonic()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        kind = mesh.devices.flat[0].device_kind
        remedies = ", or ".join(memory_remedies(config, fake=False))
        raise DeviceError(
            f"The train step does not fit the memory of a {kind}: {remedies}.\n{str(error).splitlines()[0]}"
        ) from error
    return Ahead(program, compiled, traced - start, time.monotonic() - traced)


def memory(compiled: jax.stages.Compiled) -> dict[str, int | None]:
    """What a program takes of each device's memory, in bytes, as XLA has planned it; None where it does not tell.

    Returns:
      `argument_bytes` and `output_bytes` (of the train step: state and batch, state and metrics), `alias_bytes` (of
      outputs that take the place of arguments), `temp_bytes` (everything else that the program holds), and `peak_bytes`
      (all of it together: XLA's figure, but not less than argument + output − alias + temp, as XLA's CPU backend leaves
      the temporaries out of its own).
    """
    analysis = compiled.memory_analysis()
    names = ("argument_bytes", "output_bytes", "alias_bytes", "temp_bytes", "peak_bytes")
    if analysis is None:
        return dict.fromkeys(names)
    argument, output = analysis.argument_size_in_bytes, analysis.output_size_in_bytes
    alias, temp = analysis.alias_size_in_bytes, analysis.temp_size_in_bytes
    peak = max(analysis.peak_memory_in_bytes, argument + output - alias + temp)
    return dict(zip(names, (argument, output, alias, temp, peak), strict=True))


def report(config: Config, ahead: Ahead) -> dict[str, Any]:
    """What there is to tell of a compiled train step: sizes, schedule, memory of one device, and the time it took."""
    layout, device = ahead.program.layout, ahead.program.mesh.devices.flat[0]
    lowered = layout.lowered
    return {
        "device_kind": device.device_kind,
        "num_devices": config.mesh.num_devices,
        "mesh": dict(ahead.program.mesh.shape),
        "num_parameters": num_parameters(config.model, len(config.data.classes)),
        "schedule": config.pipeline.schedule,
        "num_stages": lowered.schedule.num_stages,
        "num_microbatches": config.pipeline.num_microbatches,
        "microbatch_size": config.microbatch_size,
        "num_ticks": lowered.num_ticks,
        "semantics": {name: windows.period for name, windows in layout.windows.items()} or {"sync": lowered.num_ticks},
        "stash_slots": lowered.stash_slots,
        **memory(ahead.compiled),
        "trace_s": round(ahead.trace_s, 3),
        "compile_s": round(ahead.compile_s, 3),
        "jax_version": jax.__version__,
    }
