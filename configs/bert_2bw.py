"""The BERT models of PipeDream-2BW (Narayanan et al., ICML 2021, section 5): 355 million to 3.8 billion parameters.

With 2BW on a pipeline, as there: Adam at a rate of 1e-4 with warm-up and linear decay, sequences of 512, activations
recomputed. Large models train with pre-LN (Shoeybi et al. 2019, section 5.3), and that paper's implementation was
Megatron's. Depth 8 of the pipe for 2.2b and 16 for 3.8b on 64 GPUs are the paper's, whose throughput there was 160 and
140 sequences a second (V100, batch 512); batch and layout of the two smaller ones are ours.

Data: a folder of text files, a document each, here data/books, and a WordPiece tokenizer.json of 30,522 tokens, which
docs/bert.md makes of them, here data/tokenizer.json (--config.data.tokenizer).

    python experiments/train.py --config=configs/bert_2bw.py:355m --workdir=/tmp/355m --config.data.source=text:…
"""

from fiddlex.config import Config, DataConfig, MeshConfig, ModelConfig, OptimizerConfig, PipelineConfig, TrainConfig

# Layers, hidden size, heads, mesh (data, pipe).
MODELS = {
    "355m": (24, 1024, 16, (4, 2)),
    "1.3b": (24, 2048, 16, (4, 4)),
    "2.2b": (32, 2304, 32, (8, 8)),
    "3.8b": (32, 3072, 32, (4, 16)),
}


ARGUMENTS = tuple(MODELS)


def get_config(name: str) -> Config:
    num_layers, hidden_size, num_heads, (data, pipe) = MODELS[name]
    return Config(
        model=ModelConfig(
            family="bert",
            objective="mlm_sop",
            num_layers=num_layers,
            hidden_size=hidden_size,
            num_heads=num_heads,
            vocab_size=30522,
            seq_len=512,
            dropout=0.1,
            dtype="bfloat16",
            vocab_multiple=128,
        ),
        mesh=MeshConfig(data=data, pipe=pipe),
        pipeline=PipelineConfig(schedule="1f1b", num_microbatches=2 * pipe, semantics="2bw", recompute="full"),
        optimizer=OptimizerConfig(
            name="adamw",
            learning_rate=1e-4,
            schedule="linear",
            warmup_steps=10_000,
            weight_decay=0.01,
            clip_norm=1.0,
            beta2=0.999,
        ),
        data=DataConfig(source="text:data/books", tokenizer="data/tokenizer.json", global_batch_size=512),
        train=TrainConfig(num_steps=1_000_000, log_every=100, eval_every=10_000, checkpoint_every=5000),
    )
