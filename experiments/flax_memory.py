"""Compares the predicted memory of steps of Flax modules with the memory that XLA assigns (docs/flax.md).

    python -m experiments.flax_memory [--only=tensor …]

The model is that of experiments/flax_tiny.py with the sizes of GPT-2 small, in bfloat16. Each case is compiled for TPUs
or GPUs in a process of its own, as experiments/memory_model.py does; none need be there (extras aot, aot-gpu).
"""

from absl import app, flags

import experiments.flax_tiny  # also in the process that compiles, which imports this module
from experiments.memory_model import compiled_bytes, predicted_bytes
from fiddlex.config import Config
from fiddlex.config.overrides import override

SIZES = (
    "model.num_layers=12 model.hidden_size=768 model.num_heads=12 model.seq_len=512 model.vocab_size=8192 "
    "model.dtype=bfloat16 data.source=stdlib data.tokenizer="
)
CASES = {  # a topology, and changes to the config
    "no pipeline": ("tpu:v5e:2x2", "mesh.data=4 mesh.pipe=1 pipeline.num_microbatches=4"),
    "1F1B": ("tpu:v5e:2x2", "mesh.data=1 mesh.pipe=4 pipeline.num_microbatches=8"),
    "1F1B, recompute full": (
        "tpu:v5e:2x2",
        "mesh.data=1 mesh.pipe=4 pipeline.num_microbatches=8 pipeline.recompute=full",
    ),
    "recompute full, S 1,024": (
        "tpu:v5e:2x2",
        "mesh.data=1 mesh.pipe=4 pipeline.num_microbatches=8 pipeline.recompute=full model.seq_len=1024 "
        "data.global_batch_size=64",
    ),
    "H100, recompute full, S 1,024": (
        "gpu:h100:1x4",
        "mesh.data=1 mesh.pipe=4 pipeline.num_microbatches=8 pipeline.recompute=full model.seq_len=1024 "
        "data.global_batch_size=64",
    ),
    "H100, tensor=2, recompute full, S 1,024": (
        "gpu:h100:1x4",
        "mesh.data=1 mesh.pipe=2 mesh.tensor=2 pipeline.num_microbatches=8 pipeline.recompute=full model.seq_len=1024 "
        "data.global_batch_size=64",
    ),
    "1F1B, 2BW": (
        "tpu:v5e:2x4",
        "mesh.data=2 mesh.pipe=4 pipeline.num_microbatches=8 pipeline.semantics=2bw",
    ),
    "GPipe": ("tpu:v5e:2x2", "mesh.data=2 mesh.pipe=2 pipeline.num_microbatches=4 pipeline.schedule=gpipe"),
    "interleaved 1F1B": (
        "tpu:v5e:2x2",
        "mesh.data=2 mesh.pipe=2 pipeline.num_microbatches=4 pipeline.schedule=interleaved_1f1b pipeline.num_chunks=3",
    ),
    "ZB-H1": ("tpu:v5e:2x2", "mesh.data=1 mesh.pipe=4 pipeline.num_microbatches=8 pipeline.schedule=zb_h1"),
    "ZB-V": (
        "tpu:v5e:2x2",
        "mesh.data=2 mesh.pipe=2 pipeline.num_microbatches=4 pipeline.schedule=zb_v pipeline.num_chunks=2",
    ),
    "dropout": ("tpu:v5e:2x2", "mesh.data=1 mesh.pipe=4 pipeline.num_microbatches=8 model.dropout=0.1"),
    "tensor=2, 1F1B": ("tpu:v5e:2x4", "mesh.data=1 mesh.pipe=4 mesh.tensor=2 pipeline.num_microbatches=8"),
    "tensor=4, ZB-H1": (
        "tpu:v5e:2x4",
        "mesh.data=1 mesh.pipe=2 mesh.tensor=4 pipeline.num_microbatches=8 pipeline.schedule=zb_h1",
    ),
    "tensor=4, no pipeline": ("tpu:v5e:2x4", "mesh.data=2 mesh.pipe=1 mesh.tensor=4 pipeline.num_microbatches=4"),
    "H100, no pipeline": ("gpu:h100:1x4", "mesh.data=4 mesh.pipe=1 pipeline.num_microbatches=4"),
    "H100, 1F1B": ("gpu:h100:1x4", "mesh.data=1 mesh.pipe=4 pipeline.num_microbatches=8"),
    "H100, tensor=2, ZB-H1": (
        "gpu:h100:1x4",
        "mesh.data=1 mesh.pipe=2 mesh.tensor=2 pipeline.num_microbatches=4 pipeline.schedule=zb_h1",
    ),
    "H100, tensor=4, no pipeline": (
        "gpu:h100:1x4",
        "mesh.data=1 mesh.pipe=1 mesh.tensor=4 pipeline.num_microbatches=4",
    ),
    "1F1B, V 50,304": ("tpu:v5e:2x2", "mesh.data=1 mesh.pipe=4 pipeline.num_microbatches=8 model.vocab_size=50304"),
    "tensor=2, V 50,304": (
        "tpu:v5e:2x4",
        "mesh.data=1 mesh.pipe=4 mesh.tensor=2 pipeline.num_microbatches=8 model.vocab_size=50304",
    ),
    "tensor=4, sequence parallel": (
        "tpu:v5e:2x4",
        "mesh.data=1 mesh.pipe=2 mesh.tensor=4 mesh.sequence_parallel=true pipeline.num_microbatches=8",
    ),
    "H100, tensor=2, sequence parallel": (
        "gpu:h100:1x4",
        "mesh.data=1 mesh.pipe=2 mesh.tensor=2 mesh.sequence_parallel=true pipeline.num_microbatches=4",
    ),
    "H100, tensor=4, sequence parallel": (
        "gpu:h100:1x4",
        "mesh.data=1 mesh.pipe=1 mesh.tensor=4 mesh.sequence_parallel=true pipeline.num_microbatches=4",
    ),
    "tensor=2, v5p": ("tpu:v5p:2x2x2", "mesh.data=2 mesh.pipe=2 mesh.tensor=2 pipeline.num_microbatches=4"),
}

_ONLY = flags.DEFINE_multi_string("only", [], "part of the names of the cases to compile; all by default")


def make_config(changes: str) -> Config:
    config = override(experiments.flax_tiny.get_config(), *SIZES.split(), *changes.split())
    if "global_batch_size" not in changes:  # microbatches of two sequences
        config.data.global_batch_size = 2 * config.pipeline.num_microbatches * config.mesh.data
    return config.validate()


def main(argv: list[str]) -> None:
    """Prints a line of the table for each case."""
    print("| case | data × pipe × tensor | topology | compiled, GB | predicted, GB | |\n|---|---|---|---:|---:|---:|")
    for name, (topology, changes) in CASES.items():
        if not any(part in name for part in _ONLY.value or [""]):
            continue
        config = make_config(changes)
        mesh, predicted = config.mesh, predicted_bytes(config, topology)
        compiled, _ = compiled_bytes(config, topology)
        print(
            f"| {name} | {mesh.data} × {mesh.pipe} × {mesh.tensor} | {topology.partition(':')[2]} | "
            f"{compiled / 1e9:.2f} | {predicted / 1e9:.2f} | {predicted / compiled - 1:+.1%} |",
            flush=True,
        )


if __name__ == "__main__":
    app.run(main)
