"""GPT-2 large (Radford et al. 2019, table 2): 774 million parameters, where the paper's table says 762.

To compare with: OpenAI's own weights score 2.67 on OpenWebText's validation tokens (nanoGPT's README), not having
been trained on OpenWebText. Meant for eight GPUs; on one, --config.mesh.data=1
--config.pipeline.num_microbatches=128.

Sequence and batch are the paper's; nothing is dropped, as in nanoGPT's run, so that attention can use a flash kernel.
No learning rate was published; this one is GPT-3's for a model of this size (Brown et al. 2020, table 2.1), as is the
rest of the optimizer. The number of steps is nanoGPT's.

Data: a folder with train.bin and val.bin in GPT-2's byte pairs, as nanoGPT's data/openwebtext/prepare.py writes it.

    python experiments/train.py --config=configs/gpt2_large.py --workdir=/tmp/gpt2_large
"""

from fiddlex.config import Config, DataConfig, MeshConfig, ModelConfig, OptimizerConfig, PipelineConfig, TrainConfig


def get_config() -> Config:
    return Config(
        model=ModelConfig(
            num_layers=36,
            hidden_size=1280,
            num_heads=20,
            vocab_size=50257,
            seq_len=1024,
            dropout=0.0,
            dtype="bfloat16",
            vocab_multiple=128,
        ),
        mesh=MeshConfig(data=8),
        pipeline=PipelineConfig(num_microbatches=16),
        optimizer=OptimizerConfig(
            name="adamw",
            learning_rate=2.5e-4,
            schedule="cosine",
            warmup_steps=2000,
            final_learning_rate=2.5e-5,
            weight_decay=0.1,
            clip_norm=1.0,
            beta1=0.9,
            beta2=0.95,
        ),
        data=DataConfig(source="tokens:data/openwebtext", global_batch_size=512),
        train=TrainConfig(num_steps=600_000, log_every=10, eval_every=1000, checkpoint_every=1000),
    )
