"""Fine-tunes the model of configs/bert_tiny.py: does a line of code stand as it was written, or were two words swapped?

The task is made of the standard library's source by experiments/make_task.py, which tells how well a bag of words does.
It reads the weights in /tmp/bert_tiny and the task in /tmp/swaps, where the commands of docs/bert.md put them. Expect
91% of the held-out lines after one and a half to four minutes. The run ends when three evaluations have been no better,
and keeps its best weights.

    python experiments/train.py --config=configs/bert_swaps.py --workdir=/tmp/bert_swaps
"""

from fiddlex.config import Config, DataConfig, MeshConfig, ModelConfig, OptimizerConfig, PipelineConfig, TrainConfig


def get_config() -> Config:
    return Config(
        model=ModelConfig(
            family="bert",
            objective="classification",
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
            learning_rate=1e-3,
            schedule="linear",
            warmup_steps=100,
            weight_decay=0.01,
            clip_norm=1.0,
        ),
        data=DataConfig(
            source="jsonl:/tmp/swaps/train.jsonl",
            eval_source="jsonl:/tmp/swaps/eval.jsonl",
            text_fields="text",
            labels="intact,swapped",
            global_batch_size=64,
        ),
        train=TrainConfig(
            num_steps=1500,
            log_every=50,
            eval_every=250,
            checkpoint_every=250,
            patience=3,
            init_from="/tmp/bert_tiny",
        ),
    )
