"""Fine-tunes BERT on MultiNLI (Williams et al., NAACL 2018): does a hypothesis follow from a premise?

Settings of Devlin et al. 2019, section 4.1 and appendix A.3: three epochs (36,800 steps) at batch 32, a rate of 2e-5
with warm-up over the first tenth, sequences of 128; 84.6 is what BERT base comes to there, 86.7 BERT large. The 2BW
paper's 355 million parameter models come to 87.77 with a flush and 87.82 with 2BW.

Data: GLUE's MNLI folder. The run that it starts from must have this shape, vocabulary, tokenizer, post_norm and
layer_norm_epsilon, as one of configs/bert_base.py has; its sequences may be longer, not shorter.

    python experiments/train.py --config=configs/bert_mnli.py --workdir=/tmp/nli --config.train.init_from=/tmp/bert_base
"""

from fiddlex.config import Config, DataConfig, MeshConfig, ModelConfig, OptimizerConfig, PipelineConfig, TrainConfig


def get_config() -> Config:
    return Config(
        model=ModelConfig(
            family="bert",
            objective="classification",
            num_layers=12,
            hidden_size=768,
            num_heads=12,
            vocab_size=30522,
            seq_len=128,
            dropout=0.1,
            dtype="bfloat16",
            post_norm=True,
            layer_norm_epsilon=1e-12,
            vocab_multiple=128,
        ),
        mesh=MeshConfig(data=1),
        pipeline=PipelineConfig(num_microbatches=1),
        optimizer=OptimizerConfig(
            name="adamw",
            learning_rate=2e-5,
            schedule="linear",
            warmup_steps=3680,
            weight_decay=0.01,
            clip_norm=1.0,
            beta2=0.999,
            epsilon=1e-6,
        ),
        data=DataConfig(
            source="tsv:data/MNLI/train.tsv",
            eval_source="tsv:data/MNLI/dev_matched.tsv",
            tokenizer="data/tokenizer.json",
            text_fields="sentence1,sentence2",
            label_field="gold_label",
            labels="entailment,neutral,contradiction",
            truncate=True,
            global_batch_size=32,
        ),
        train=TrainConfig(
            num_steps=36_800,
            log_every=100,
            eval_every=3680,
            checkpoint_every=3680,
            patience=3,
        ),
    )
