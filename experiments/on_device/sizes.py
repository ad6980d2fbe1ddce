"""The models that are measured on a GPU, their batches, and their data."""

import dataclasses
import pathlib
from collections.abc import Mapping

import numpy as np

from fiddlex.config import Config

NUM_TOKENS = 2**21 + 1  # odd, so that they are not taken for halves of uint32 ids


@dataclasses.dataclass(frozen=True)
class Size:
    """A model of GPT-2's kind and its batches.

    Attributes:
      label: what tables call it.
      num_layers, hidden_size, num_heads, vocab_size: its shape.
      learning_rate: of AdamW.
      microbatch_sizes: examples in a microbatch, by the length of the sequences.
      in_float32: whether losses are compared with those of a run in float32, which takes memory and time.
    """

    label: str
    num_layers: int
    hidden_size: int
    num_heads: int
    vocab_size: int
    learning_rate: float
    microbatch_sizes: Mapping[int, int]
    in_float32: bool = True


# GPT-2 small (Radford et al. 2019, table 2), with the vocabulary padded as nanoGPT's train.py pads it, and a GPT of
# GPT-3 XL's layers and width (Brown et al. 2020, table 2.1), which has heads of 128 elements. `tiny` is for CPUs.
SIZES = {
    "tiny": Size("tiny", 2, 32, 2, 256, 1e-3, {32: 2}),
    "small": Size("GPT-2 small, 124M", 12, 768, 12, 50304, 6e-4, {1024: 16, 2048: 8}),
    "1.3b": Size("GPT, 1.3B", 24, 2048, 16, 50304, 2e-4, {1024: 4, 2048: 2}, in_float32=False),
}
NUM_MICROBATCHES = 8


def config_of(size: Size, seq_len: int, *, dtype: str, tokens: pathlib.Path) -> Config:
    """The config of a size, which nanoGPT can compute too, on one device."""
    config = Config()
    model, optimizer = config.model, config.optimizer
    model.num_layers, model.hidden_size, model.num_heads = size.num_layers, size.hidden_size, size.num_heads
    model.vocab_size, model.seq_len, model.dtype, model.gelu = size.vocab_size, seq_len, dtype, "erf"
    optimizer.learning_rate, optimizer.schedule, optimizer.weight_decay = size.learning_rate, "constant", 0.1
    optimizer.clip_norm = 1.0
    config.pipeline.num_microbatches = NUM_MICROBATCHES
    config.data.global_batch_size = NUM_MICROBATCHES * size.microbatch_sizes[seq_len]
    config.data.source = f"tokens:{tokens}"
    return config.validate()


def write_tokens(path: pathlib.Path, vocab_size: int) -> None:
    """Writes random tokens whose frequencies fall as those of words do (Zipf), from a fixed seed."""
    weights = 1 / np.arange(1, vocab_size + 1)
    tokens = np.random.default_rng(0).choice(vocab_size, NUM_TOKENS, p=weights / weights.sum())
    tokens.astype("<u2").tofile(path)
