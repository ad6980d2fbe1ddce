"""Which window of the pipeline each step runs, put on the devices once for all steps that run the same.

A phase of the run (`pipeline.semantics_schedule`) begins with an empty pipeline and ends with one: the last windows of
a phase start nothing of the batches after it. So does the run. After its end, where a notebook may take more steps, the
pipeline fills again and goes on.
"""

import math

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fiddlex.pipeline.continuous import Call
from fiddlex.schedules.semantics import Phase
from fiddlex.schedules.windows import Renames, Window, Windows
from fiddlex.train.step.state import Layout


class Calls:
    """The calls of a run.

    Args:
      layout: with windows.
      mesh: to put them on.
    """

    def __init__(self, layout: Layout, mesh: Mesh):
        self._phases, self._windows = layout.pipeline.phases, layout.pipeline.windows
        self._frame = layout.pipeline.frame
        self._longest = max(windows.longest for windows in self._windows.values())
        self._sharding = NamedSharding(mesh, P())
        self._restarted = 0
        self._on_devices: dict[tuple[str, int, int], Call] = {}

    def abstract(self) -> Call:
        """Shapes, dtypes and shardings of a call."""
        call = self._call(next(iter(self._windows.values()))[0], 0)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._sharding), call)

    def restart(self, step: int) -> None:
        """Nothing is in flight when step number `step`, counted from 0, begins: the state comes from a checkpoint."""
        self._restarted = step

    def num_batches(self, step: int) -> int:
        """Batches that may be under way in a step, its own included."""
        return int(min(self._frame.sizes.batches, self._end(step) - step))

    def of(self, step: int) -> Call:
        """The call of a step."""
        phase, batches = self._phase(step), self.num_batches(step)
        begun = phase.start if step < phase.end else phase.end
        windows = self._windows[phase.semantics]
        number = _repeated(windows, step - max(begun, self._restarted))
        key = phase.semantics, number, batches
        if key not in self._on_devices:
            self._on_devices[key] = jax.device_put(self._call(windows[number], batches), self._sharding)
        return self._on_devices[key]

    def _phase(self, step: int) -> Phase:
        return next((phase for phase in self._phases if step < phase.end), self._phases[-1])

    def _end(self, step: int) -> float:
        """The step at which the pipeline is empty again."""
        phase = self._phase(step)
        return phase.end if step < phase.end else math.inf

    def _call(self, window: Window, num_batches: int) -> Call:
        table = window.until(num_batches * self._frame.batch_size)
        padding = [(0, self._longest - len(table)), (0, 0), (0, 0)]
        renames = (
            np.stack([np.concatenate([row, np.arange(len(row), size)]) for row in rename]).astype(np.int32)
            for rename, size in zip(window.renames, self._frame.sizes.slots, strict=True)
        )
        return Call(np.pad(table, padding), np.int32(len(table)), Renames(*renames))


def _repeated(windows: Windows, number: int) -> int:
    """The first call that runs the same window."""
    late = number - len(windows.first)
    return number if late < 0 else len(windows.first) + late % len(windows.cycle)
