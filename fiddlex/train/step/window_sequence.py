"""Selects the window that each step runs, and puts every distinct window on the devices once.

The pipeline is empty at the start and the end of the run and of each of its phases (`pipeline.semantics_schedule`): the
last windows of a phase start no microbatch of later batches. If a notebook takes more steps after the end of the run,
the pipeline fills again and continues.
"""

import math

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fiddlex.parallel.sharding import on_devices
from fiddlex.pipeline.continuous import DeviceWindow
from fiddlex.schedules.semantics import Phase
from fiddlex.schedules.windows import Renames, Window, Windows
from fiddlex.train.step.state import WeightLayout


class WindowSequence:
    """The windows of a run's steps, for a layout whose pipeline has windows."""

    def __init__(self, layout: WeightLayout, mesh: Mesh):
        # A run that decides about its phases sets them anew; steps and batches that have begun must keep their phase.
        self.phases, self._windows = layout.pipeline.phases, layout.pipeline.windows
        self._spec = layout.pipeline.spec
        self._longest = max(windows.longest for windows in self._windows.values())
        self._sharding = NamedSharding(mesh, P())
        self._restarted = 0
        self._on_devices: dict[tuple[str, int, int], DeviceWindow] = {}

    def abstract(self) -> DeviceWindow:
        """Shapes, dtypes and shardings of a window."""
        window = self._device_window(next(iter(self._windows.values()))[0], 0)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._sharding), window)

    def restart(self, step: int) -> None:
        """Records that nothing is in flight when step number `step` (from 0) begins, as after loading a checkpoint."""
        self._restarted = step

    def num_batches(self, step: int) -> int:
        """The number of batches that may be in flight in a step, its own included."""
        return int(min(self._spec.sizes.batches, self._end(step) - step))

    def of(self, step: int) -> DeviceWindow:
        phase, batches = self._phase(step), self.num_batches(step)
        begun = phase.start if step < phase.end else phase.end
        windows = self._windows[phase.semantics]
        number = _repeated(windows, step - max(begun, self._restarted))
        key = phase.semantics, number, batches
        if key not in self._on_devices:
            self._on_devices[key] = on_devices(self._device_window(windows[number], batches), self._sharding)
        return self._on_devices[key]

    def semantics(self, step: int) -> str:
        return self._phase(step).semantics

    def _phase(self, step: int) -> Phase:
        return next((phase for phase in self.phases if step < phase.end), self.phases[-1])

    def _end(self, step: int) -> float:
        """The step at which the pipeline is empty again."""
        phase = self._phase(step)
        return phase.end if step < phase.end else math.inf

    def _device_window(self, window: Window, num_batches: int) -> DeviceWindow:
        table = window.until(num_batches * self._spec.batch_size)
        padding = [(0, self._longest - len(table)), (0, 0), (0, 0)]
        renames = (
            np.stack([np.concatenate([row, np.arange(len(row), size)]) for row in rename]).astype(np.int32)
            for rename, size in zip(window.renames, self._spec.sizes.slots, strict=True)
        )
        return DeviceWindow(np.pad(table, padding), np.int32(len(table)), Renames(*renames))


def _repeated(windows: Windows, number: int) -> int:
    """The number of the first window equal to window number `number`, counted from an empty pipeline."""
    late = number - len(windows.first)
    return number if late < 0 else len(windows.first) + late % len(windows.cycle)
