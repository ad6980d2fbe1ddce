"""Prints the temporary memory of a train step for growing numbers of microbatches of a constant size.

    python -m experiments.benchmarks.memory [--microbatches=8,16,32,64,128 --config.model.hidden_size=512 …]

No step is run: the bytes are those of XLA's buffer assignment (`memory_analysis`), for one device. A step of fiddlex is
compared with the same layers in a scan over ticks that `jax.grad` differentiates (`scan_pipeline`), without and with
`jax.checkpoint` around the stage. In fiddlex's step only two things grow: a device's part of the schedule's table,
about 100 bytes a tick, and a loss for each microbatch.
"""

import copy
import os

from absl import flags

from experiments.benchmarks.sizes import base_config, with_microbatches
from fiddlex.terminal.command_line import define_changes, run

_CONFIG = define_changes(base_config())
_MICROBATCHES = flags.DEFINE_list("microbatches", ["8", "16", "32", "64", "128"], "numbers of microbatches to compile")

ROWS = [  # schedule, chunks, recompute
    ("1f1b", 1, "none"),
    ("1f1b", 1, "selective"),
    ("1f1b", 1, "full"),
    ("interleaved_1f1b", 2, "none"),
    ("interleaved_1f1b", 2, "full"),
    ("zb_h1", 1, "none"),
]


def main(argv: list[str]) -> None:
    """Prints the table."""
    base, counts = _CONFIG.value, [int(count) for count in _MICROBATCHES.value]
    # The code never runs, so it need not be fast: this halves the compile time and does not change the buffers.
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"

    from experiments.benchmarks.programs import make_program, temporary_bytes
    from experiments.benchmarks.scan_pipeline import make_scan_step

    print(f"| MB, pipe={base.mesh.pipe} | " + " | ".join(f"m = {count}" for count in counts) + " |")
    print("|---|" + "---:|" * len(counts))
    for schedule, chunks, recompute in ROWS:
        config = copy.deepcopy(base)
        config.pipeline.schedule, config.pipeline.num_chunks, config.pipeline.recompute = schedule, chunks, recompute
        name = f"{schedule}{f' v={chunks}' if chunks > 1 else ''}, recompute={recompute}"
        programs = (make_program(with_microbatches(config, count)) for count in counts)
        _print_row(f"fiddlex {name}", [temporary_bytes(program, program.step) for program in programs])
    for checkpoint_stage in (False, True):
        name = f"`jax.grad` of a scan{', stage checkpointed' if checkpoint_stage else ''}"
        programs = (make_program(with_microbatches(base, count)) for count in counts)
        steps = ((program, make_scan_step(program, checkpoint_stage=checkpoint_stage)) for program in programs)
        _print_row(name, [temporary_bytes(program, step) for program, step in steps])


def _print_row(name: str, sizes: list[int]) -> None:
    print(f"| {name} | " + " | ".join(f"{size / 1e6:.1f}" for size in sizes) + " |", flush=True)


if __name__ == "__main__":
    run(main)
