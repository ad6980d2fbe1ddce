"""What a model is trained to do, as sizes: how much of an example is scored, and against what."""

from typing import NamedTuple

from fiddlex.config import Config

PAIR_CLASSES = 2  # classes of sentence pairs: the second text follows the first, or it does not


class Task(NamedTuple):
    """The sizes of `config.model.task`."""

    # sequences in an example, each of `model.seq_len` tokens: the choices in multiple choice, else 1
    num_sequences: int
    num_scored: int  # positions of an example whose tokens are predicted: all in lm, the masked ones in mlm, or 0
    picks_positions: bool  # whether only some positions of the sequence are scored, as in masked language modelling
    # numbers that the head computes from a sequence for the label: the classes, 1 in multiple choice, or 0
    num_outputs: int


def task_of(config: Config) -> Task:
    name, length = config.model.task, config.model.seq_len
    masked = max_masked(length, config.data.mask_fraction)
    num_scored, picks_positions, num_outputs = {
        "lm": (length, False, 0),
        "mlm": (masked, True, 0),
        "mlm_nsp": (masked, True, PAIR_CLASSES),
        "mlm_sop": (masked, True, PAIR_CLASSES),
        "classification": (0, False, len(config.data.classes)),
        "multiple_choice": (0, False, 1),
    }[name]
    return Task(config.sequences_per_example, num_scored, picks_positions, num_outputs)


def max_masked(seq_len: int, mask_fraction: float) -> int:
    """The most tokens masked in one example: `mask_fraction` of `seq_len`, at least 1; the same for a whole run."""
    return max(1, round(mask_fraction * seq_len))


class Field(NamedTuple):
    """One array of an example."""

    shape: tuple[int, ...]  # a batch has one more dimension before these
    dtype: str  # its name; all have four bytes


def example_fields(config: Config) -> dict[str, Field]:
    """The arrays of an example of `config.model.task`, by name.

    `tokens` and `targets` are ids of the vocabulary. `segments` numbers the segments, within which positions attend to
    each other (0: padding). `token_types` gives the text of a pair that each token is in. `masked_positions` lists the
    scored positions. `weights` and `label_weights` are the share of each target or label in the loss.
    """
    task, name, length = task_of(config), config.model.task, config.model.seq_len
    sequences = (length,) if name != "multiple_choice" else (task.num_sequences, length)
    fields = {"tokens": Field(sequences, "int32")}
    if name != "lm":
        fields |= {each: Field(sequences, "int32") for each in ("segments", "token_types")}
    scored = (task.num_scored,)
    if task.picks_positions:
        fields["masked_positions"] = Field(scored, "int32")
    if task.num_scored:
        fields |= {"targets": Field(scored, "int32"), "weights": Field(scored, "float32")}
    if task.num_outputs:
        fields |= {"labels": Field((), "int32"), "label_weights": Field((), "float32")}
    return fields
