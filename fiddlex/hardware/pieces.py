"""Into which pieces the products under `mesh.collective_matmul` are cut (`fiddlex.models.collective_matmul`).

On TPUs and CPUs the parts of the sequence travel around a ring of the tensor ranks, and a product runs once for each
part, or for each half of a part. On GPUs each rank's part is cut into blocks, and a product runs once for each block,
with that block of all ranks.
"""

# A product of fewer rows takes longer to read its kernel than to multiply: it does one operation on each byte of the
# kernel for each row, and a TPU v5e, a v5p and an H100 do 240, 166 and 295 in the time in which they read a byte.
LEAST_ROWS = 256
MOST_BLOCKS = 8  # each block has operations of its own in the program


def runs_in_blocks(platform: str) -> bool:
    """Whether products run in blocks on a platform, as jax names it (`cpu`, `gpu` or `tpu`); otherwise in rings."""
    # XLA schedules the permutes of a ring one after the other on GPUs, and each waits for all devices of the program.
    return platform == "gpu"


def num_pieces(batch: int, length: int, ranks: int, *, in_blocks: bool) -> int:
    """The number of pieces of a product: blocks, or parts and halves of parts in a ring.

    A microbatch has `batch` sequences, and each of the tensor `ranks` has `length` positions of a sequence.
    """
    return num_blocks(batch, length, ranks) if in_blocks else ranks * num_ways(batch, length)


def num_ways(batch: int, length: int) -> int:
    """2 where half of each part travels in each direction around the ring, else 1; arguments as in `num_pieces`.

    Between two ranks both directions are one link; there a half travels beside the product of the other half.
    """
    return 2 if length % 2 == 0 and batch * length // 2 >= LEAST_ROWS else 1


def num_blocks(batch: int, length: int, ranks: int) -> int:
    """The number of blocks of equal length into which each part is cut; arguments as in `num_pieces`."""
    rows = batch * length * ranks
    return max(
        number
        for number in range(1, MOST_BLOCKS + 1)
        if length % number == 0 and (number == 1 or rows // number >= LEAST_ROWS)
    )
