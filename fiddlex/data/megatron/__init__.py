"""Megatron-LM's indexed datasets: PREFIX.bin and PREFIX.idx, their splits and blends, and examples of them."""
