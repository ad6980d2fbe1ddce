"""Llama 3 (Grattafiori et al. 2024, arXiv:2407.21783): the shapes of the published Llama 3.2 1B and Llama 3.1 8B, 70B.

Shapes, rotary positions and tied embeddings are those of the published `config.json`. The peak learning rates of 8b and
70b are the paper's (table 3); 1b was distilled from larger models, and has the rate of 8b here. Sequences have 8,192
tokens, as in most of the paper's training; batches have two million tokens, where the paper used four to sixteen for
its largest model. The rest of the optimizer is usual, with the decay to a hundredth of the paper's largest model.
Expect no particular loss: the paper's data are not public.

Meshes of 8 devices of 80 GB for 1b and 8b, and of 64 for 70b. On others, let experiments/plan.py choose.

Data: a folder with train.bin and val.bin in Llama 3's tokens, as uint32.

    python experiments/train.py --config=configs/llama.py:8b --workdir=/tmp/llama_8b
"""

import dataclasses

from fiddlex.config import Config, DataConfig, MeshConfig, ModelConfig, OptimizerConfig, PipelineConfig, TrainConfig

SEQ_LEN = 8192
BATCH_SIZE = 256  # sequences; two million tokens


@dataclasses.dataclass(frozen=True)
class Shape:
    """The shape of a published model, its learning rate, and a mesh for it."""

    layers: int
    hidden_size: int
    ffn_size: int
    heads: int
    rope_factor: float
    tied: bool
    learning_rate: float
    mesh: MeshConfig


SHAPES = {
    "1b": Shape(16, 2048, 8192, 32, 32.0, True, 3e-4, MeshConfig(data=8)),
    "8b": Shape(32, 4096, 14336, 32, 8.0, False, 3e-4, MeshConfig(data=2, tensor=4, sequence_parallel=True)),
    "70b": Shape(80, 8192, 28672, 64, 8.0, False, 1.5e-4, MeshConfig(pipe=8, tensor=8, sequence_parallel=True)),
}


ARGUMENTS = tuple(SHAPES)


def get_config(name: str) -> Config:
    shape = SHAPES[name]
    return Config(
        model=ModelConfig(
            family="llama",
            num_layers=shape.layers,
            hidden_size=shape.hidden_size,
            num_heads=shape.heads,
            num_kv_heads=8,
            ffn_size=shape.ffn_size,
            vocab_size=128256,
            seq_len=SEQ_LEN,
            dtype="bfloat16",
            tied_embeddings=shape.tied,
            rope_base=500000.0,
            rope_scaling="llama3",
            rope_factor=shape.rope_factor,
        ),
        mesh=dataclasses.replace(shape.mesh),
        pipeline=PipelineConfig(
            schedule="interleaved_1f1b" if shape.mesh.pipe > 1 else "1f1b",
            num_chunks=2 if shape.mesh.pipe > 1 else 1,
            num_microbatches=BATCH_SIZE // shape.mesh.data,
            recompute="full",
        ),
        optimizer=OptimizerConfig(
            name="adamw",
            learning_rate=shape.learning_rate,
            schedule="cosine",
            warmup_steps=2000,
            final_learning_rate=shape.learning_rate / 100,
            weight_decay=0.1,
            clip_norm=1.0,
            beta1=0.9,
            beta2=0.95,
        ),
        data=DataConfig(source="tokens:data/llama3", token_dtype="uint32", global_batch_size=BATCH_SIZE),
        train=TrainConfig(num_steps=100_000, eval_every=1000, checkpoint_every=1000),
    )
