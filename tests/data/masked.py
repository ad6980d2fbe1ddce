"""Streams whose tokens tell where they stand, and examples as they were before masking."""

import numpy as np

from fiddlex.data import TokenStream

PAD, CLS, SEP = 0, 1, 2  # of the tokenizer `numbered`


def stream_of(lengths: list[int]) -> TokenStream:
    """Documents of tokens in a row, from 10 on, with a number left out between documents."""
    tokens, token = [], 10
    for length in lengths:
        tokens += [SEP] * bool(tokens) + list(range(token, token + length))
        token += length + 1
    return TokenStream(np.array(tokens, np.uint16), separator=SEP)


def restored(example: dict[str, np.ndarray]) -> np.ndarray:
    """The tokens as they were before masking, int32[seq_len]."""
    tokens, real = example["tokens"].copy(), example["weights"] == 1
    tokens[example["masked_positions"][real]] = example["targets"][real]
    return tokens
