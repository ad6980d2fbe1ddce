"""Megatron's files by struct alone, and its packing by concatenation: slow, and written without fiddlex."""

import itertools
import struct

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}
LETTERS = {"uint8": "B", "int8": "b", "int16": "h", "int32": "i", "int64": "q", "uint16": "H"}


def write(prefix, documents, dtype="uint16"):
    """Writes documents, each a list of sequences, each a list of ids."""
    sequences = [sequence for document in documents for sequence in document]
    letter = LETTERS.get(dtype, "d" if dtype == "float64" else "f")
    size = struct.calcsize("<" + letter)
    pointers, edges = [0], [0]
    for sequence in sequences:
        pointers.append(pointers[-1] + size * len(sequence))
    for document in documents:
        edges.append(edges[-1] + len(document))
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, CODES[dtype], len(sequences), len(edges))
    lengths = struct.pack(f"<{len(sequences)}i", *map(len, sequences))
    rest = struct.pack(f"<{len(sequences)}q", *pointers[:-1]) + struct.pack(f"<{len(edges)}q", *edges)
    prefix.with_name(prefix.name + ".idx").write_bytes(head + lengths + rest)
    ids = [token for sequence in sequences for token in sequence]
    prefix.with_name(prefix.name + ".bin").write_bytes(struct.pack(f"<{len(ids)}{letter}", *ids))
    return prefix


def read(prefix):
    """The documents of files, each a list of sequences, each a list of ids."""
    index = prefix.with_name(prefix.name + ".idx").read_bytes()
    data = prefix.with_name(prefix.name + ".bin").read_bytes()
    _, _, code, num_sequences, num_edges = struct.unpack_from("<9sQBQQ", index)
    letter = LETTERS[{code: name for name, code in CODES.items()}[code]]
    lengths = struct.unpack_from(f"<{num_sequences}i", index, 34)
    pointers = struct.unpack_from(f"<{num_sequences}q", index, 34 + 4 * num_sequences)
    edges = struct.unpack_from(f"<{num_edges}q", index, 34 + 12 * num_sequences)
    sequences = [
        list(struct.unpack_from(f"<{length}{letter}", data, pointer))
        for length, pointer in zip(lengths, pointers, strict=True)
    ]
    return [sequences[first:last] for first, last in itertools.pairwise(edges)]


def samples(sequences, order, seq_len):
    """The samples of `sequences` in `order`: seq_len + 1 tokens each, of which neighbours share one."""
    tokens = [token for number in order for token in sequences[number]]
    starts = range(0, len(tokens) - seq_len, seq_len)
    return [tokens[start : start + seq_len + 1] for start in starts]
