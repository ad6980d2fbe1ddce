"""Prints the temporary memory of a train step as microbatches are added, each as large as before.

    python -m experiments.benchmarks.memory [--microbatches=8,16,32,64,128 --config.model.hidden_size=512 …]

Nothing is run: the bytes are those of XLA's buffer assignment (`memory_analysis`), for one device. A step of fiddlex is
held against the same layers in a scan over ticks that `jax.grad` turns around (`scan_pipeline`), plain and with
`jax.checkpoint` around the stage. What grows in fiddlex's is the copy that XLA makes of the batch itself, 12 bytes a
token, and 100 bytes of the schedule's table for a tick.
"""

import copy
import os

from absl import flags

from fiddlex.config import Config
from fiddlex.flags import apply_overrides, define_overrides, run

define_overrides("the benchmark")
_MICROBATCHES = flags.DEFINE_list("microbatches", ["8", "16", "32", "64", "128"], "numbers of microbatches to compile")

ROWS = [  # schedule, chunks, recompute
    ("1f1b", 1, "none"),
    ("1f1b", 1, "selective"),
    ("1f1b", 1, "full"),
    ("interleaved_1f1b", 2, "none"),
    ("interleaved_1f1b", 2, "full"),
    ("zb_h1", 1, "none"),
]


def base_config() -> Config:
    """A model whose activations outweigh its gradients on each of four stages."""
    config = Config()
    config.model.num_layers, config.model.hidden_size, config.model.num_heads = 8, 256, 4
    config.model.seq_len, config.model.vocab_size = 256, 1024
    config.mesh.pipe = 4
    return config


def main(argv: list[str]) -> None:
    """Prints the table."""
    base, counts = apply_overrides(base_config()), [int(count) for count in _MICROBATCHES.value]
    # Code that nothing runs need not be fast: this halves the time to compile and leaves the buffers alone.
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"

    print(f"| MB, pipe={base.mesh.pipe} | " + " | ".join(f"m = {count}" for count in counts) + " |")
    print("|---|" + "---:|" * len(counts))
    for schedule, chunks, recompute in ROWS:
        config = copy.deepcopy(base)
        config.pipeline.schedule, config.pipeline.num_chunks, config.pipeline.recompute = schedule, chunks, recompute
        name = f"{schedule}{f' v={chunks}' if chunks > 1 else ''}, recompute={recompute}"
        _print_row(f"fiddlex {name}", [fiddlex_bytes(with_microbatches(config, count)) for count in counts])
    for checkpoint_stage in (False, True):
        name = f"`jax.grad` of a scan{', stage checkpointed' if checkpoint_stage else ''}"
        sizes = [scan_bytes(with_microbatches(base, m), checkpoint_stage=checkpoint_stage) for m in counts]
        _print_row(name, sizes)


def with_microbatches(config: Config, num_microbatches: int, *, microbatch_size: int = 1) -> Config:
    """The config with a batch of so many microbatches, each of `microbatch_size` examples on each replica."""
    config = copy.deepcopy(config)
    config.pipeline.num_microbatches = num_microbatches
    config.data.global_batch_size = config.mesh.data * num_microbatches * microbatch_size
    return config


def fiddlex_bytes(config: Config) -> int:
    """Temporary bytes of the compiled train step on one device."""
    from experiments.benchmarks.programs import make_program

    return make_program(config).lower().compile().memory_analysis().temp_size_in_bytes


def scan_bytes(config: Config, *, checkpoint_stage: bool) -> int:
    """The same of the pipeline that `jax.grad` makes."""
    from experiments.benchmarks.programs import make_program
    from experiments.benchmarks.scan_pipeline import make_scan_gradients, make_scan_step

    program = make_program(config)
    gradients = make_scan_gradients(
        program.model, program.config, program.mesh, program.layout, checkpoint_stage=checkpoint_stage
    )
    step = make_scan_step(gradients, program.optimizer, mesh=program.mesh, specs=program.specs)
    return step.lower(program.state, program.batch).compile().memory_analysis().temp_size_in_bytes


def _print_row(name: str, sizes: list[int]) -> None:
    print(f"| {name} | " + " | ".join(f"{size / 1e6:.1f}" for size in sizes) + " |", flush=True)


if __name__ == "__main__":
    run(main)
