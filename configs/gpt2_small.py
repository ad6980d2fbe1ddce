"""GPT-2 small (Radford et al. 2019, table 2): 124 million parameters, where the paper's table says 117.

Expect a loss of about 2.85 on OpenWebText's validation tokens, where nanoGPT, with nearly this recipe, ends after
four days on eight A100s (its README); OpenAI's own weights, not trained on OpenWebText, score 3.12. Meant for one
GPU; on eight, --config.mesh.data=8 --config.pipeline.num_microbatches=8.

Sequence and batch are the paper's; nothing is dropped, as in nanoGPT's run, so that attention can use a flash kernel.
No learning rate was published; this one is GPT-3's for a model of this size (Brown et al. 2020, table 2.1), as is the
rest of the optimizer. The number of steps is nanoGPT's.

Data: a folder with train.bin and val.bin in GPT-2's byte pairs, as nanoGPT's data/openwebtext/prepare.py writes it.

    python experiments/train.py --config=configs/gpt2_small.py --workdir=/tmp/gpt2_small
"""

from fiddlex.config import Config, DataConfig, MeshConfig, ModelConfig, OptimizerConfig, PipelineConfig, TrainConfig


def get_config() -> Config:
    return Config(
        model=ModelConfig(
            num_layers=12,
            hidden_size=768,
            num_heads=12,
            vocab_size=50257,
            seq_len=1024,
            dropout=0.0,
            dtype="bfloat16",
            vocab_multiple=128,
        ),
        mesh=MeshConfig(data=1),
        pipeline=PipelineConfig(num_microbatches=64),
        optimizer=OptimizerConfig(
            name="adamw",
            learning_rate=6e-4,
            schedule="cosine",
            warmup_steps=2000,
            final_learning_rate=6e-5,
            weight_decay=0.1,
            clip_norm=1.0,
            beta1=0.9,
            beta2=0.95,
        ),
        data=DataConfig(source="tokens:data/openwebtext", global_batch_size=512),
        train=TrainConfig(num_steps=600_000, log_every=10, eval_every=1000, checkpoint_every=1000),
    )
