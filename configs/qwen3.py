"""Qwen3's dense models (Yang et al. 2025, arXiv:2505.09388, table 1): heads of 128, RMSNorm of queries and keys.

Shapes and rotary positions are those of the published `config.json`. The report gives no learning rates, so that the
optimizer has usual values; its data are not public, so that no particular loss is to be expected. Sequences have 4,096
tokens, as in the first of the report's stages.

Meshes of 8 devices of 80 GB, and of 32 for 32b. On others, let experiments/plan.py choose.

Data: a folder with train.bin and val.bin in Qwen's tokens, as uint32.

    python experiments/train.py --config=configs/qwen3.py:0.6b --workdir=/tmp/qwen3_0.6b
"""

import dataclasses

from fiddlex.config import Config, DataConfig, MeshConfig, ModelConfig, OptimizerConfig, PipelineConfig, TrainConfig

SEQ_LEN = 4096
BATCH_SIZE = 512  # sequences; two million tokens


@dataclasses.dataclass(frozen=True)
class Shape:
    """The shape of a published model, and a mesh for it."""

    layers: int
    hidden_size: int
    ffn_size: int
    heads: int
    tied: bool
    mesh: MeshConfig


SHAPES = {
    "0.6b": Shape(28, 1024, 3072, 16, True, MeshConfig(data=8)),
    "1.7b": Shape(28, 2048, 6144, 16, True, MeshConfig(data=8)),
    "4b": Shape(36, 2560, 9728, 32, True, MeshConfig(data=4, tensor=2, sequence_parallel=True)),
    "8b": Shape(36, 4096, 12288, 32, False, MeshConfig(data=2, tensor=4, sequence_parallel=True)),
    "14b": Shape(40, 5120, 17408, 40, False, MeshConfig(tensor=8, sequence_parallel=True)),
    "32b": Shape(64, 5120, 25600, 64, False, MeshConfig(pipe=4, tensor=8, sequence_parallel=True)),
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
            head_dim=128,
            ffn_size=shape.ffn_size,
            vocab_size=151936,
            seq_len=SEQ_LEN,
            dtype="bfloat16",
            layer_norm_epsilon=1e-6,
            qk_norm=True,
            tied_embeddings=shape.tied,
            rope_base=1e6,
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
            learning_rate=3e-4,
            schedule="cosine",
            warmup_steps=2000,
            final_learning_rate=3e-5,
            weight_decay=0.1,
            clip_norm=1.0,
            beta1=0.9,
            beta2=0.95,
        ),
        data=DataConfig(source="tokens:data/qwen3", token_dtype="uint32", global_batch_size=BATCH_SIZE),
        train=TrainConfig(num_steps=100_000, eval_every=1000, checkpoint_every=1000),
    )
