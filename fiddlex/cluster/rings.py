"""In how many directions the parts of a sequence travel around the tensor ranks (`fiddlex.models.ring_products`)."""

# A product of fewer rows takes longer to read its kernel than to multiply: it does one operation on each byte of the
# kernel for each row, and a TPU v5e, a v5p and an H100 do 240, 166 and 295 in the time in which they read a byte.
LEAST_ROWS = 256


def num_ways(batch: int, length: int, ranks: int) -> int:
    """2 where half of each part travels in each direction around the ring, else 1.

    Args:
      batch: number of sequences of a microbatch.
      length: number of positions of a rank's part of a sequence.
      ranks: number of tensor ranks.
    """
    halves = length % 2 == 0 and batch * length // 2 >= LEAST_ROWS
    return 2 if halves and ranks > 2 else 1  # between two ranks both directions are one link
