"""What an example holds, for each thing that a model is trained to do: names, shapes and dtypes."""

from typing import NamedTuple

import numpy as np

from fiddlex.config import Config
from fiddlex.sizes import max_masked


class Field(NamedTuple):
    """One array of an example."""

    shape: tuple[int, ...]
    dtype: type[np.generic]


def example_fields(config: Config) -> dict[str, Field]:
    """The arrays of an example of `config.model.task`; a batch has one more dimension before theirs.

    `tokens` and `targets` are ids of the vocabulary, `segments` number what may attend to each other (0: padding),
    `token_types` tell the second text of a pair, `weights` and `label_weights` the share of each target or label in the
    loss.
    """
    task, length = config.model.task, config.model.seq_len
    rows = (config.data.num_choices,) if task == "multiple_choice" else ()
    fields = {"tokens": Field((*rows, length), np.int32)}
    if task == "lm":
        scored = length
    else:
        fields |= {name: Field((*rows, length), np.int32) for name in ("segments", "token_types")}
        scored = max_masked(length, config.data.mask_fraction) if task.startswith("mlm") else 0
        if scored:
            fields["masked_positions"] = Field((scored,), np.int32)
    if scored:
        fields |= {"targets": Field((scored,), np.int32), "weights": Field((scored,), np.float32)}
    if task not in ("lm", "mlm"):
        fields |= {"labels": Field((), np.int32), "label_weights": Field((), np.float32)}
    return fields
