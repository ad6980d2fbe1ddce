"""Fine-tunes the model of a folder of transformers, whose sizes, tokenizer and weights it takes from the folder.

    python experiments/train.py --config=configs/huggingface.py:/data/Qwen3-0.6B --workdir=/tmp/qwen3 \
        --config.data.source=text:/data/articles

Any field can be overridden. The recipe is a usual one to continue with: AdamW at 2e-5 with a linear decay after a tenth
of the steps, clipping at 1, batches of 32 sequences of at most 1,024 tokens, and an evaluation of each hundred steps.
The mesh has one device: set --config.mesh.data, .pipe and .tensor, or let experiments/plan.py choose.

For a BERT that is to classify, set --config.model.objective=classification, --config.data.labels and
--config.data.source=tsv:PATH or jsonl:PATH (docs/bert.md). Expect no particular result: it depends on the data.
"""

from fiddlex.config import Config
from fiddlex.errors import ConfigError
from fiddlex.interop.starting import starting_config


def get_config(folder: str = "") -> Config:
    if not folder:
        raise ConfigError("the config huggingface needs a folder: use --config=huggingface:DIR.")
    config = starting_config(folder)
    config.model.seq_len = min(config.model.seq_len, 1024)
    config.optimizer.name = "adamw"
    config.optimizer.learning_rate = 2e-5
    config.optimizer.schedule = "linear"
    config.optimizer.warmup_steps = 100
    config.optimizer.weight_decay = 0.01
    config.optimizer.clip_norm = 1.0
    config.optimizer.beta2 = 0.999
    config.data.global_batch_size = 32
    config.train.num_steps = 1000
    config.train.eval_every = 100
    config.train.checkpoint_every = 100
    return config
