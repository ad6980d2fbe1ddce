"""The device on which PyTorch trains, and its dtype of arithmetic, as a job has them."""

import sys

import torch

from third_party.protocol import Job


def prepare(job: Job) -> torch.device:
    """Sets PyTorch up for the job's device, and returns the device.

    Float32 products on GPUs are of TensorFloat-32, as in nanoGPT's `train.py` and by jax's default.

    Raises:
      SystemExit: when the job's device is a GPU and PyTorch finds none.
    """
    torch.set_num_threads(len(job.cores))
    if job.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        sys.exit(
            f"torch {torch.__version__} finds no GPU. Install a PyTorch with CUDA that this machine's driver can run, "
            "or train on the CPU (--device=cpu)."
        )
    torch.set_float32_matmul_precision("high")
    return torch.device("cuda", 0)


def arithmetic(job: Job) -> torch.autocast:
    """The context of forward passes: weights are float32, and products are of the job's dtype."""
    return torch.autocast(job.device, torch.bfloat16, enabled=job.dtype == "bfloat16")


def wait(job: Job) -> None:
    """Waits until the device has done everything."""
    if job.device == "cuda":
        torch.cuda.synchronize()


def peak_bytes(job: Job) -> int | None:
    """The most bytes that tensors have had on the GPU at once since the start; None on CPUs."""
    return torch.cuda.max_memory_allocated() if job.device == "cuda" else None
