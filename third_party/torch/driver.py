"""A driver of PyTorch: eager or compiled in one process, or `torch.distributed.pipelining` with gloo on CPUs.

    PYTHON -m third_party.torch.driver JOB.json

Options of the job (`third_party.protocol`):

- `mode`: `eager` (default), `compile`, or a schedule of `third_party.torch.pipeline.SCHEDULES`.
- `microbatches`: microbatches in a batch; by default those of the config. With 1, a step is one pass over the batch.
- of a pipeline: `processes` (2), `layers` (as in `5+3`, the layers of each stage; by default as even as possible),
  `compile` (`yes` compiles each stage; not under zero-bubble schedules).

In bfloat16, `torch.autocast` runs products in bfloat16, and weights stay in float32. On GPUs the attention of a causal
model (`scaled_dot_product_attention`) is a flash kernel.
"""

import os
import shutil
import sys
from collections.abc import Callable

import torch

from third_party.protocol import Job, Training, serve
from third_party.torch.device import arithmetic, peak_bytes, prepare, wait
from third_party.torch.model import Stage, adamw, batches, loss, set_learning_rate
from third_party.torch.pipeline import SCHEDULES, Pipeline


def start(job: Job) -> Training:
    """Prepares the training that the job's options name."""
    mode = job.options.get("mode", "eager")
    if mode == "compile" or job.options.get("compile") == "yes":
        require_compiler()
    if mode in SCHEDULES:
        pipeline = Pipeline(job)
        return Training(pipeline.train, f"torch {torch.__version__}", pipeline.cpu_seconds)
    device = prepare(job)
    model = Stage(job, range(job.model["num_layers"])).to(device)
    score = lambda tokens, targets: loss(model(tokens), targets)  # noqa: E731
    train = trainer(job, score, adamw(job, model.parameters()), compiled=mode == "compile")
    return Training(train, f"torch {torch.__version__}", peak_bytes=lambda: peak_bytes(job))


def require_compiler() -> None:
    """Ends the program when there is no C++ compiler, which torch.compile needs, on GPUs too."""
    names = [os.environ.get("CXX", "g++"), "g++", "clang++"]
    if not any(map(shutil.which, names)):
        sys.exit("torch.compile needs a C++ compiler, and there is no g++ and no clang++. Install one.")


def trainer(
    job: Job,
    score: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    compiled: bool,
) -> Callable[[int], list[float]]:
    """Makes the function that trains some steps and returns their losses.

    Args:
      job: the job.
      score: maps tokens and targets to the mean loss.
      optimizer: the optimizer of all parameters.
      compiled: whether `torch.compile` compiles `score`.
    """
    clip_norm, done = job.config["optimizer"]["clip_norm"], 0
    num_microbatches = int(job.options.get("microbatches", job.num_microbatches))
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    device = parameters[0].device
    data = batches(job, device)
    if compiled:
        score = torch.compile(score)

    def train(steps: int) -> list[float]:
        nonlocal done
        losses = []  # on the device, so that steps need not wait for one another
        for _ in range(steps):
            total = torch.zeros((), device=device)
            parts = (part.chunk(num_microbatches) for part in data[done % len(data)])
            for tokens, targets in zip(*parts, strict=True):
                with arithmetic(job):
                    part = score(tokens, targets) / num_microbatches
                part.backward()
                total += part.detach()
            if clip_norm:
                torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
            set_learning_rate(optimizer, job.learning_rate(done))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total)
            done += 1
        wait(job)
        return torch.stack(losses).tolist()

    return train


if __name__ == "__main__":
    serve(start)
