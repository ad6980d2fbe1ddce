"""Made-up data for BERT: padding, several segments in an example, unequal numbers of masked tokens; plain scores."""

import dataclasses

import jax
import numpy as np

from fiddlex.config import Config
from fiddlex.data.dataset import Dataset
from fiddlex.models.task_sizes import Field, example_fields
from fiddlex.train.trainer import Trainer
from tests import reference, reference_bert


@dataclasses.dataclass(frozen=True)
class RandomExamples:
    """Examples with the fields of a config's task, of random numbers."""

    fields: dict[str, Field]
    vocab_size: int
    num_classes: int
    size: int = 64

    def __len__(self) -> int:
        return self.size

    def example(self, index: int, *, epoch: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng([epoch, index])
        found = {name: np.zeros(shape, dtype) for name, (shape, dtype) in self.fields.items()}
        rows, length = found["tokens"].reshape(-1, found["tokens"].shape[-1]).shape
        for name, most in (("tokens", self.vocab_size), ("token_types", 2)):
            found[name][...] = rng.integers(0, most, found[name].shape)
        # A row is one to three segments and some padding; short rows are as likely as full ones.
        segments = found["segments"].reshape(rows, length)
        for row in segments:
            used = rng.integers(4, length + 1)
            row[:used] = 1 + np.sort(rng.integers(0, 3, used))
        if "targets" in found:
            masked = found["targets"].shape[0]
            count = rng.integers(0, masked + 1)
            found["masked_positions"][:count] = rng.choice(length, count, replace=False)
            found["targets"][:count] = rng.integers(0, self.vocab_size, count)
            found["weights"][:count] = 1
        if "labels" in found:
            found["labels"][...] = rng.integers(0, self.num_classes)
            found["label_weights"][...] = 1
        return found


def random_dataset(config: Config) -> Dataset:
    """Enough examples for a few steps, and fewer held out than a batch has."""
    classes = {"classification": len(config.data.classes), "multiple_choice": config.data.num_choices}
    fields, num_classes = example_fields(config), classes.get(config.model.task, 2)
    train, heldout = (RandomExamples(fields, config.model.vocab_size, num_classes, size) for size in (64, 37))
    return Dataset("random", "random examples", "random", train, heldout, tokenizer=None)


def of_task(config: Config, task: str) -> Config:
    config.model.family, config.model.objective, config.model.post_norm = "bert", task, True
    if task == "classification":
        config.data.labels = "a,b,c"
    if task == "multiple_choice":
        config.data.num_choices = 3
    if task in ("classification", "multiple_choice"):
        config.data.source = "jsonl:none"  # where a test makes examples up
    return config


def on_a_mesh(config: Config) -> Config:
    config.model.num_layers, config.data.eval_batches = 4, 0
    config.mesh.data = config.mesh.pipe = config.mesh.tensor = 2
    config.mesh.sequence_parallel = True
    config.pipeline.schedule, config.pipeline.num_chunks = "interleaved_1f1b", 2
    config.pipeline.num_microbatches = 4
    return config


def scored(trainer: Trainer) -> dict[str, np.ndarray]:
    """By the plain model, over all held-out examples: losses and guesses of masked tokens and of labels."""
    config, examples = trainer.config, trainer.dataset.heldout
    weights = reference.unstack(trainer.weights())
    found = [examples.example(i, epoch=0) for i in range(len(examples))]
    batch = {name: np.stack([example[name] for example in found]) for name in found[0]}
    x, results = reference_bert.hidden_fn(weights, batch, None, config), {}
    if "targets" in batch:
        logits = reference_bert.masked_logits_fn(weights, x, config)
        chosen = batch["weights"] > 0
        rows, _ = np.nonzero(chosen)
        logits, targets = np.asarray(logits)[rows, batch["masked_positions"][chosen]], batch["targets"][chosen]
        results |= {"tokens": losses_of(logits, targets), "right_tokens": logits.argmax(-1) == targets}
    if "labels" in batch:
        logits = np.asarray(reference_bert.label_logits_fn(weights, x, batch, None, config))
        results |= {"labels": losses_of(logits, batch["labels"]), "right_labels": logits.argmax(-1) == batch["labels"]}
    return results


def losses_of(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    return -np.asarray(jax.nn.log_softmax(logits))[np.arange(len(targets)), targets]
