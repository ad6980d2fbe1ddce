"""Fine-tunes BERT on RACE (Lai et al., EMNLP 2017): which of four answers to a question about a passage is right?

Settings of the 2BW paper's fine-tuning are not published; these are those of RoBERTa (Liu et al. 2019, table 10): four
epochs (22,000 steps) at batch 16, a rate of 1e-5 with warm-up over six hundredths, sequences of 512, of which passages
lose their ends. The 2BW paper's 355 million parameter models come to 80.06 with a flush and 79.48 with 2BW.

Data: JSON Lines, one question a line (RACE's own files have several in one object: write a line for each):

    {"article": "It rained.", "question": "What fell?", "options": ["Rain.", "Snow.", "Hail.", "Ash."], "answer": "A"}

The run that it starts from must have this shape, vocabulary, tokenizer, post_norm and layer_norm_epsilon, as one of
configs/bert_2bw.py:355m has.

    python experiments/train.py --config=configs/bert_race.py --workdir=/tmp/race --config.train.init_from=/tmp/355m
"""

from fiddlex.config import Config, DataConfig, MeshConfig, ModelConfig, OptimizerConfig, PipelineConfig, TrainConfig


def get_config() -> Config:
    return Config(
        model=ModelConfig(
            family="bert",
            objective="multiple_choice",
            num_layers=24,
            hidden_size=1024,
            num_heads=16,
            vocab_size=30522,
            seq_len=512,
            dropout=0.1,
            dtype="bfloat16",
            vocab_multiple=128,
        ),
        mesh=MeshConfig(data=8),
        pipeline=PipelineConfig(num_microbatches=1),
        optimizer=OptimizerConfig(
            name="adamw",
            learning_rate=1e-5,
            schedule="linear",
            warmup_steps=1320,
            weight_decay=0.1,
            clip_norm=1.0,
            beta2=0.98,
            epsilon=1e-6,
        ),
        data=DataConfig(
            source="jsonl:data/race/train.jsonl",
            eval_source="jsonl:data/race/dev.jsonl",
            tokenizer="data/tokenizer.json",
            text_fields="article,question",
            choices_fields="options",
            label_field="answer",
            num_choices=4,
            truncate=True,
            global_batch_size=16,
        ),
        train=TrainConfig(
            num_steps=22_000,
            log_every=100,
            eval_every=2200,
            checkpoint_every=2200,
            patience=3,
        ),
    )
