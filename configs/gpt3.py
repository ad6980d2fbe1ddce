"""The GPT models of Narayanan et al. 2021 (SC'21, arXiv:2104.04473), tables 1 and 2, to a trillion parameters.

The published mesh and batch of each. Pipelines are interleaved, with the fewest chunks that divide a rank's layers.
Expect speed, which is what the paper reports, and not a loss: 135 to 163 TF/s on each A100 (43 to 52% of its peak),
counted with full recomputation (`fiddlex.costs.sizes.hardware_flops`). Microbatches hold one example, so that any
pipeline is as full as its batch allows; the paper does not list them. It ran in float16, we in bfloat16, and drop
nothing, so that attention can use a flash kernel. The optimizer is that of Brown et al. 2020, appendix B, with the
learning rate of the nearest size in its table 2.1.

The meshes take as many devices as the table has GPUs, 32 to 3072. On fewer, lower mesh.data and raise the microbatches
by as much, which trains the same: on eight, --config.mesh.data=8 --config.pipeline.num_microbatches=64 for 1.7b.

    python experiments/train.py --config=configs/gpt3.py:1.7b --workdir=/tmp/gpt3_1.7b
"""

import dataclasses

from fiddlex.config import Config, DataConfig, MeshConfig, ModelConfig, OptimizerConfig, PipelineConfig, TrainConfig

SEQ_LEN = 2048
TRAIN_TOKENS, WARMUP_TOKENS = 300e9, 375e6  # Brown et al.


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a table and the learning rate for its size."""

    heads: int
    hidden_size: int
    layers: int
    tensor: int
    pipe: int
    gpus: int
    batch_size: int
    learning_rate: float


ROWS = {
    "1.7b": Row(24, 2304, 24, 1, 1, 32, 512, 2e-4),
    "3.6b": Row(32, 3072, 30, 2, 1, 64, 512, 1.6e-4),
    "7.5b": Row(32, 4096, 36, 4, 1, 128, 512, 1.2e-4),
    "18.4b": Row(48, 6144, 40, 8, 1, 256, 1024, 1e-4),
    "39.1b": Row(64, 8192, 48, 8, 2, 512, 1536, 1e-4),
    "76.1b": Row(80, 10240, 60, 8, 4, 1024, 1792, 6e-5),
    "145.6b": Row(96, 12288, 80, 8, 8, 1536, 2304, 6e-5),
    "174.6b": Row(96, 12288, 96, 8, 12, 384, 1536, 6e-5),  # GPT-3's size, from table 2
    "310.1b": Row(128, 16384, 96, 8, 16, 1920, 2160, 6e-5),
    "529.6b": Row(128, 20480, 105, 8, 35, 2520, 2520, 6e-5),
    "1008b": Row(160, 25600, 128, 8, 64, 3072, 3072, 6e-5),
}


ARGUMENTS = tuple(ROWS)


def get_config(name: str) -> Config:
    row = ROWS[name]
    data = row.gpus // (row.tensor * row.pipe)
    step_tokens = row.batch_size * SEQ_LEN
    rank_layers = row.layers // row.pipe
    num_chunks = next(c for c in range(2, rank_layers + 1) if rank_layers % c == 0) if row.pipe > 1 else 1
    return Config(
        model=ModelConfig(
            num_layers=row.layers,
            hidden_size=row.hidden_size,
            num_heads=row.heads,
            vocab_size=51200,  # GPT-2's, already padded
            seq_len=SEQ_LEN,
            dropout=0.0,
            dtype="bfloat16",
        ),
        mesh=MeshConfig(data=data, pipe=row.pipe, tensor=row.tensor),
        pipeline=PipelineConfig(
            schedule="interleaved_1f1b" if row.pipe > 1 else "1f1b",
            num_chunks=num_chunks,
            num_microbatches=row.batch_size // data,
            recompute="full",
        ),
        optimizer=OptimizerConfig(
            name="adamw",
            learning_rate=row.learning_rate,
            schedule="cosine",
            warmup_steps=round(WARMUP_TOKENS / step_tokens),
            final_learning_rate=row.learning_rate / 10,
            weight_decay=0.1,
            clip_norm=1.0,
            beta1=0.9,
            beta2=0.95,
        ),
        data=DataConfig(source="tokens:data/openwebtext", global_batch_size=row.batch_size),
        train=TrainConfig(num_steps=round(TRAIN_TOKENS / step_tokens), eval_every=1000, checkpoint_every=1000),
    )
