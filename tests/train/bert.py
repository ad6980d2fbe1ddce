"""Made-up data for BERT: padding, several segments in an example, and unequal numbers of masked tokens."""

import dataclasses

import numpy as np

from fiddlex.config import Config
from fiddlex.data.dataset import Dataset
from fiddlex.data.fields import Field, example_fields


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
