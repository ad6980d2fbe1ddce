"""Compares training with stashes of different types: losses, errors of gradients, and what encoding costs.

    python -m experiments.stash_dtypes --results=docs/studies/stash_dtypes.jsonl [--seeds=3 --steps=2000 …]
    python -m experiments.stash_dtypes --results=docs/studies/stash_dtypes.jsonl --finished

The runs train byte-level GPTs on the source of Python's standard library, on one CPU device in float32. All runs of a
seed have equal data, steps and initial weights. `same` runs a second time with more microbatches, which changes
only the order of sums, to show how far chance alone moves a loss. `--topology` names one TPU, for which the two passes
of a layer of GPT-2 medium are compiled. Each finished part adds a line to the results, so that a stopped study
continues where it stopped; `--finished` prints the tables of what is there and computes nothing.
"""

import dataclasses
import datetime
import functools
import itertools
import logging
import pathlib
from collections.abc import Callable
from typing import Any

from absl import flags

from experiments.results import append_result, read_results
from experiments.stash_results import LOSSY, Results, cost_table, gradient_table, loss_table
from experiments.stash_runs import cases, gradient_errors, layer_costs, step_seconds, train
from fiddlex.config.values.stash import STASH_DTYPES
from fiddlex.terminal.command_line import run

logger = logging.getLogger("fiddlex.stash_dtypes")

LAYER, EXAMPLES = "configs/gpt2_medium.py", 4  # whose passes are compiled, and the examples of its microbatch

_RESULTS = flags.DEFINE_string("results", None, "JSON Lines file of finished parts, read and added to", required=True)
_HIDDEN = flags.DEFINE_multi_integer("hidden", [64, 128], "hidden sizes of the models; 64, 128 or 256")
_SEEDS = flags.DEFINE_integer("seeds", 3, "seeds for each model and type", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 2000, "steps of a run", lower_bound=10)
_AFTER = flags.DEFINE_multi_integer("after", [0, 300], "exact steps before a gradient is compared", lower_bound=0)
_TOPOLOGIES = flags.DEFINE_multi_string("topology", [], "TPU to compile for, as tpu:v5e:1x1")
_FINISHED = flags.DEFINE_bool("finished", False, "print the tables of what is finished, and compute nothing")

Part = tuple[dict[str, Any], Callable[[], Any]]  # what identifies a part, and what computes its result


def main(argv: list[str]) -> None:
    """Computes the missing parts and prints the tables."""
    path = pathlib.Path(_RESULTS.value)
    results: Results = read_results(path, ["part"])
    for key, compute in [] if _FINISHED.value else parts():
        if not any(key.items() <= result.items() for result in results):
            results.append(key | {"found": compute()} | {"date": str(datetime.date.today())})
            logger.info("finished %s", key)
            append_result(path, results[-1])
    print("\n\n".join([loss_table(results), gradient_table(results), cost_table(results)]))


def parts() -> list[Part]:
    """All parts that the flags ask for, those that take longest last."""
    found: list[Part] = []
    for topology, stash_dtype in itertools.product(_TOPOLOGIES.value, STASH_DTYPES):
        compute = functools.partial(layer_costs, LAYER, topology, stash_dtype, EXAMPLES)
        found.append(({"part": "layer", "topology": topology, "stash_dtype": stash_dtype}, compute))
    for hidden in _HIDDEN.value:
        found.append(({"part": "step", "hidden": hidden}, functools.partial(step_seconds, hidden, STASH_DTYPES)))
        for after, stash_dtype in itertools.product(_AFTER.value, LOSSY):
            compute = functools.partial(gradient_errors, hidden, stash_dtype, after)
            key = {"part": "gradient", "hidden": hidden, "after": after, "stash_dtype": stash_dtype}
            found.append((key, compute))
    for case in cases(_HIDDEN.value, _SEEDS.value, _STEPS.value):
        found.append(({"part": "training", **dataclasses.asdict(case)}, functools.partial(train, case)))
    return found


if __name__ == "__main__":
    run(main)
