"""A byte-level BERT small enough for a laptop's CPU, trained on the source of Python's standard library.

Masked language model (Devlin et al., NAACL 2019) with pre-LN layers, which train in so few steps without a long warm-up
(Shoeybi et al. 2019). Expect it to predict some 54% of the masked bytes after one and a half to four minutes; always
saying the most common one is right for 28% (experiments/evaluate.py tells both). Short sequences and large initial
weights are what lets it learn so soon where to look: with 128 bytes and the usual 0.02 it knows little but how common
bytes are by then.
Eight devices, two along each axis of the mesh, with two chunks of one layer on each rank of the pipe; on a CPU fiddlex
makes them up.

    python experiments/train.py --config=configs/bert_tiny.py --workdir=/tmp/bert_tiny
"""

from fiddlex.config import Config, DataConfig, MeshConfig, ModelConfig, OptimizerConfig, PipelineConfig, TrainConfig


def get_config() -> Config:
    return Config(
        model=ModelConfig(
            family="bert",
            num_layers=4,
            hidden_size=64,
            num_heads=4,
            vocab_size=256,
            seq_len=32,
            init_std=0.15,
        ),
        mesh=MeshConfig(data=2, pipe=2, tensor=2),
        pipeline=PipelineConfig(schedule="interleaved_1f1b", num_chunks=2, num_microbatches=2),
        optimizer=OptimizerConfig(
            name="adamw",
            learning_rate=6e-3,
            schedule="linear",
            warmup_steps=100,
            weight_decay=0.01,
            clip_norm=1.0,
        ),
        data=DataConfig(source="stdlib", global_batch_size=64),
        train=TrainConfig(num_steps=1600, log_every=50, eval_every=800, checkpoint_every=200),
    )
