"""BERT base (Devlin et al., NAACL 2019, section 3): 110 million parameters, with next-sentence prediction.

Shape, optimizer and batch are the paper's (appendix A.2): Adam at a rate of 1e-4 with 10,000 steps of warm-up and
linear decay over a million steps, weight decay 0.01, dropout 0.1, batches of 256 sequences of 512 tokens. Meant for
eight GPUs; GLUE's MNLI then comes to 84.6 in the paper (table 1), after fine-tuning with configs/bert_mnli.py.

Data: a folder of text files, a document each, here data/books, and a WordPiece tokenizer.json of 30,522 tokens, which
docs/bert.md makes of them, here data/tokenizer.json (--config.data.tokenizer). Wherever a word's pieces should be
masked together, add --config.data.whole_words=True.

    python experiments/train.py --config=configs/bert_base.py --workdir=/tmp/bert_base --config.data.source=text:…
"""

from fiddlex.config import Config, DataConfig, MeshConfig, ModelConfig, OptimizerConfig, PipelineConfig, TrainConfig


def get_config() -> Config:
    return Config(
        model=ModelConfig(
            family="bert",
            objective="mlm_nsp",
            num_layers=12,
            hidden_size=768,
            num_heads=12,
            vocab_size=30522,
            seq_len=512,
            dropout=0.1,
            dtype="bfloat16",
            post_norm=True,
            layer_norm_epsilon=1e-12,
            vocab_multiple=128,
        ),
        mesh=MeshConfig(data=8),
        pipeline=PipelineConfig(num_microbatches=2),
        optimizer=OptimizerConfig(
            name="adamw",
            learning_rate=1e-4,
            schedule="linear",
            warmup_steps=10_000,
            weight_decay=0.01,
            clip_norm=1.0,
            beta2=0.999,
            epsilon=1e-6,
        ),
        data=DataConfig(source="text:data/books", tokenizer="data/tokenizer.json", global_batch_size=256),
        train=TrainConfig(num_steps=1_000_000, log_every=100, eval_every=10_000, checkpoint_every=5000),
    )
