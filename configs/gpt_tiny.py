"""A byte-level GPT small enough for a laptop's CPU, trained on the source of Python's standard library.

The shape of nanoGPT's example for a CPU, whose README reports a validation loss of 1.88 per character of Shakespeare.
Eight devices, two along each axis of the mesh, with two chunks of one layer on each rank of the pipe; on a CPU fiddlex
makes them up. `2bw` does not flush between batches; it predicts the delayed weights and trains with Muon
(docs/prediction.md).

    python experiments/train.py --config=configs/gpt_tiny.py --workdir=/tmp/gpt_tiny
    python experiments/train.py --config=configs/gpt_tiny.py:2bw --workdir=/tmp/gpt_tiny_2bw
"""

from fiddlex.config import Config, DataConfig, MeshConfig, ModelConfig, OptimizerConfig, PipelineConfig, TrainConfig

ARGUMENTS = ("", "2bw")


def get_config(semantics: str = "") -> Config:
    config = Config(
        model=ModelConfig(num_layers=4, hidden_size=128, num_heads=4, vocab_size=256, seq_len=128),
        mesh=MeshConfig(data=2, pipe=2, tensor=2),
        pipeline=PipelineConfig(schedule="interleaved_1f1b", num_chunks=2, num_microbatches=4),
        optimizer=OptimizerConfig(
            name="adamw",
            learning_rate=4e-3,
            schedule="cosine",
            warmup_steps=100,
            final_learning_rate=4e-4,
            weight_decay=0.1,
            clip_norm=1.0,
        ),
        data=DataConfig(source="stdlib", global_batch_size=16),
        train=TrainConfig(num_steps=600, log_every=20, eval_every=300, checkpoint_every=100, sample_tokens=400),
    )
    if semantics == "2bw":
        config.pipeline.semantics = "2bw"
        config.pipeline.prediction, config.pipeline.prediction_order = "extrapolate", 2
        config.optimizer.name, config.optimizer.momentum = "muon", 0.95
        config.optimizer.learning_rate, config.optimizer.final_learning_rate = 8e-3, 8e-4
    return config
