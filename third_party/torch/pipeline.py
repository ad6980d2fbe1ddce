"""A GPT-2 trained by a schedule of `torch.distributed.pipelining`, each stage in a process of its own core.

The first and the last stage have a copy each of the token table. After each batch the two gradients are added up, as
Megatron-LM does it, so that both copies stay equal.
"""

import itertools
import os
import tempfile
import time

import torch
import torch.distributed as dist
from torch.distributed import pipelining

from third_party.protocol import Job
from third_party.torch.device import arithmetic
from third_party.torch.model import Stage, adamw, batches, loss, set_learning_rate

SCHEDULES = {  # with the stages of a rank among `processes` ranks
    "gpipe": (pipelining.ScheduleGPipe, lambda rank, processes: [rank]),
    "1f1b": (pipelining.Schedule1F1B, lambda rank, processes: [rank]),
    "interleaved": (pipelining.ScheduleInterleaved1F1B, lambda rank, processes: [rank, rank + processes]),
    "interleaved-zb": (pipelining.ScheduleInterleavedZeroBubble, lambda rank, processes: [rank, rank + processes]),
    "zbv": (pipelining.ScheduleZBVZeroBubble, lambda rank, processes: [rank, 2 * processes - 1 - rank]),
}
_CPU_SECONDS = 0  # what rank 0 asks the others for, in place of a number of steps to train


class Rank:
    """One process of the pipeline.

    Args:
      job: the job.
      rank: the number of the process.
      processes: the number of processes.
      meeting: path of a file by which they find each other.
    """

    def __init__(self, job: Job, rank: int, processes: int, meeting: str):
        cores = job.cores[rank::processes] or job.cores[-1:]
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(len(cores))
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=processes)
        self._job, self._data, self._done = job, batches(job, torch.device("cpu")), 0
        schedule, place = SCHEDULES[job.options["mode"]]
        layers = split(job, len(place(0, processes)) * processes)
        self._stages = {number: Stage(job, layers[number]) for number in place(rank, processes)}
        self._holders = [next(r for r in range(processes) if n in place(r, processes)) for n in (0, len(layers) - 1)]
        self._tied = dist.new_group(sorted(set(self._holders)))
        for stage in self._stages.values():
            stage.forward = arithmetic(job)(stage.forward)  # type: ignore[method-assign]
        if job.options.get("compile") == "yes":
            for stage in self._stages.values():
                stage.compile()
        parts = [
            pipelining.PipelineStage(stage, number, len(layers), torch.device("cpu"))
            for number, stage in self._stages.items()
        ]
        num_microbatches = int(job.options.get("microbatches", job.num_microbatches))
        self._schedule = schedule(
            parts if len(parts) > 1 else parts[0], num_microbatches, loss_fn=arithmetic(job)(loss)
        )
        self._parameters = [p for stage in self._stages.values() for p in stage.parameters()]
        self._optimizer = adamw(job, self._parameters)

    def train(self, steps: int) -> list[float]:
        """Trains some steps and returns their losses, on every rank."""
        losses = torch.zeros(steps)
        for number in range(steps):
            losses[number] = self._step()
        dist.broadcast(losses, self._holders[1])
        return losses.tolist()

    def _step(self) -> float:
        """Trains one step and returns its loss on the rank of the last stage, else 0."""
        tokens, targets = self._data[self._done % len(self._data)]
        losses: list[torch.Tensor] = []
        fields = {"target": targets, "losses": losses} if any(s.is_last for s in self._stages.values()) else {}
        self._schedule.step(*([tokens] if 0 in self._stages else []), **fields)
        self._add_tied()
        self._clip()
        set_learning_rate(self._optimizer, self._job.learning_rate(self._done))
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._done += 1
        return torch.stack(losses).mean().item() if losses else 0.0

    def _add_tied(self) -> None:
        """Gives each copy of the token table the sum of the gradients of both."""
        grads = [stage.wte.weight.grad for stage in self._stages.values() if stage.is_first or stage.is_last]
        if len(grads) == 2:
            grads[0].add_(grads[1])
            grads[1].copy_(grads[0])
        elif grads:
            dist.all_reduce(grads[0], group=self._tied)

    def _clip(self) -> None:
        """Scales gradients down to the largest norm allowed; the token table counts once."""
        if not (clip_norm := self._job.config["optimizer"]["clip_norm"]):
            return
        copy = next((s.wte.weight for s in self._stages.values() if s.is_last and not s.is_first), None)
        squares = sum(p.grad.square().sum() for p in self._parameters if p is not copy)
        dist.all_reduce(squares)
        scale = clip_norm / max(squares.sqrt().item(), clip_norm)
        for parameter in self._parameters:
            parameter.grad.mul_(scale)

    def cpu_seconds(self) -> float:
        """CPU seconds so far, over all ranks."""
        seconds = torch.tensor(time.process_time(), dtype=torch.float64)
        dist.all_reduce(seconds)
        return seconds.item()


class Pipeline:
    """All processes of the pipeline; this process is rank 0."""

    def __init__(self, job: Job):
        processes = int(job.options.get("processes", 2))
        meeting = os.path.join(tempfile.mkdtemp(dir=job.folder), "meeting")
        context = torch.multiprocessing.get_context("spawn")
        for rank in range(1, processes):
            context.Process(target=_follow, args=(job, rank, processes, meeting), daemon=True).start()
        self._rank = Rank(job, 0, processes, meeting)

    def train(self, steps: int) -> list[float]:
        """Trains some steps and returns their losses."""
        _tell(steps)
        return self._rank.train(steps)

    def cpu_seconds(self) -> float:
        """CPU seconds so far, over all processes."""
        _tell(_CPU_SECONDS)
        return self._rank.cpu_seconds()


def split(job: Job, num_stages: int) -> list[range]:
    """The layers of each stage."""
    total = job.model["num_layers"]
    if "layers" in job.options:
        sizes = [int(size) for size in job.options["layers"].split("+")]
    else:
        sizes = [total // num_stages + (stage < total % num_stages) for stage in range(num_stages)]
    if len(sizes) != num_stages or sum(sizes) != total or min(sizes) < 1:
        raise SystemExit(
            f"layers={'+'.join(map(str, sizes))}: {num_stages} stages need {num_stages} numbers from 1 on that add up "
            f"to the model's {total} layers."
        )
    return [range(end - size, end) for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]


def _tell(command: int) -> int:
    """What rank 0 tells all ranks."""
    told = torch.tensor(command)
    dist.broadcast(told, 0)
    return int(told)


def _follow(job: Job, rank: int, processes: int, meeting: str) -> None:
    """Does what rank 0 tells until that process ends, which also ends this one."""
    follower = Rank(job, rank, processes, meeting)
    while True:
        command = _tell(_CPU_SECONDS)
        if command == _CPU_SECONDS:
            follower.cpu_seconds()
        else:
            follower.train(command)
