"""The stage `flash`: the fused kernel of attention, run on the device (`experiments.on_device.flash`)."""

import functools

from experiments.on_device.programs import answer_of
from experiments.on_device.study import Study

# Dtype, length of the sequences, width of a head, and whether attention is causal or masks between segments.
CASES = {
    "cuda": (
        ("bfloat16", 1024, 64, "causal"),
        ("bfloat16", 2048, 64, "causal"),
        ("bfloat16", 1024, 128, "causal"),
        ("bfloat16", 2048, 128, "causal"),
        ("bfloat16", 1024, 256, "causal"),
        ("bfloat16", 1024, 64, "segments"),
        ("float32", 1024, 64, "causal"),
    ),
    "cpu": (("bfloat16", 256, 64, "causal"), ("float32", 256, 64, "segments")),
}


def run_kernels(study: Study, device: str) -> None:
    """Runs the cases of a device; each is a part of the study."""
    for case in CASES[device]:
        dtype, length, width, kind = case
        program = functools.partial(answer_of, "experiments.on_device.flash", *map(str, case), device=device)
        study.measure("flash", f"{kind}, {length:,} positions, heads of {width}, {dtype}", {}, program)
