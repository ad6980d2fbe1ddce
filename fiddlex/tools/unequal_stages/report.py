"""Formats the partitioners' answers as text and as JSON."""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from fiddlex.planner.bound import Cut
from fiddlex.planner.plans import Plan
from fiddlex.planner.report import exchange_text, plan_facts, table
from fiddlex.terminal.readable import gib, readable_size
from fiddlex.tools.unequal_stages.answers import EQUAL, Answer, Answers
from fiddlex.tools.unequal_stages.piper import Stage

EXECUTOR = (
    "The executor runs uniform layouts only, in which all stages have the same replicas and tensor ranks. The "
    "partitioners' pipelines cannot be trained here."
)
COLUMNS = (
    "Seconds of a batch: full, where the pipeline never drains; flush, with filling and draining. PipeDream takes the "
    "larger of passes and exchange, Piper their sum. Both leave out the optimizer's update."
)
COMPARISON = (
    "The rows of data=… are the planner's layouts, with all that it counts (docs/planner.md). Compare Piper's answer "
    f"with the row {EQUAL}, of the fastest stages with equal replicas and tensor ranks by the same costs."
)
_HEADINGS = (
    "answer",
    "stages",
    "layers",
    "replicas",
    "tensor",
    "recompute",
    "microbatches",
    "full, s",
    "flush, s",
    "devices",
    "GiB",
)


def as_text(answers: Answers) -> str:
    rows = [_HEADINGS, *map(_row, answers.unequal), *map(_uniform_row, answers.uniform or ())]
    lines = [f"{answers.title}\n\n{table(rows)}\n"]
    over = [each.name for each in answers.unequal if round(each.pipeline.memory_bytes) > answers.memory_bytes]
    limit = f"{readable_size(answers.memory_bytes)} of each device"
    if over:
        lines.append(f"{over[0]} has no cap on memory: its answer does not fit {limit}.")
    for each in answers.unequal:
        most = max(stage.replicas for stage in each.pipeline.stages)
        if most > each.num_microbatches:
            lines.append(
                f"{each.name} leaves out how large a batch is: of a stage's {most} replicas, "
                f"{most - each.num_microbatches} get no microbatch, so that a batch takes longer than the table says."
            )
    if answers.uniform == ():
        lines.append(f"No uniform layout fits {limit}; without --partition this command tells what would help.")
    lines.append(COLUMNS)
    if answers.uniform:
        lines.append(COMPARISON)
    return "\n".join([*lines, EXECUTOR])


def _row(answer: Answer) -> tuple[str, ...]:
    stages = answer.pipeline.stages
    of = f" of {answer.examples}" if answer.examples else ""
    return (
        answer.name,
        f"{len(stages)}",
        runs(stage.last - stage.first + 1 for stage in stages),
        runs(stage.replicas for stage in stages),
        runs(stage.tensor for stage in stages),
        _recomputed(stages),
        f"{answer.num_microbatches}{of}",
        f"{answer.batch_s:.4g}",
        f"{answer.flushed_s:.4g}",
        f"{answer.pipeline.num_devices}",
        gib(answer.pipeline.memory_bytes),
    )


def _uniform_row(plan: Plan) -> tuple[str, ...]:
    layout, flushes = plan.layout, plan.layout.semantics == "sync"
    layers = Cut.of(
        layout.schedule, layout.mesh.pipe, layout.chunks, plan.config.model.num_layers, layout.num_microbatches
    ).placement.layers_per_stage
    seconds = f"{plan.step_time_s:.4g}"
    between = " ".join(f"{axis}={size}" for axis, size in layout.mesh.sizes.items() if axis != "tensor")
    return (
        f"{between}, {layout.schedule}, {layout.semantics}",
        f"{len(layers)}",
        runs(layers),
        f"{layout.mesh.data}",
        f"{layout.mesh.tensor}{exchange_text(layout.mesh)}",
        layout.recompute,
        f"{layout.mesh.data * layout.num_microbatches} of {plan.config.microbatch_size}",
        "" if flushes else seconds,
        seconds if flushes else "",
        f"{layout.mesh.num_devices}",
        gib(plan.memory.peak),
    )


def runs(numbers: Iterable[int]) -> str:
    """Numbers with those that follow each other alike once, as in `7, 3 × 12, 5` for 7, three times 12, and 5."""
    groups = [(number, len(list(group))) for number, group in itertools.groupby(numbers)]
    parts = [f"{times} × {number}" if times > 1 else f"{number}" for number, times in groups]
    return ", ".join(parts) if len(parts) <= 8 else ", ".join([*parts[:3], "…", parts[-1]])


def _recomputed(stages: Sequence[Stage]) -> str:
    """How many layers of all stages recompute what, the most frequent first; the one word where all do the same."""
    counts = Counter(choice.recompute for stage in stages for choice in stage.choices if choice.recompute)
    if len(counts) <= 1:
        return next(iter(counts), "none")
    return ", ".join(f"{number} × {recompute}" for recompute, number in counts.most_common())


def as_json(answers: Answers) -> dict[str, Any]:
    return {
        "topology": answers.topology.name,
        "num_devices": answers.num_devices,
        "memory_limit_bytes": answers.memory_bytes,
        "operations": answers.operations or None,
        "answers": [_facts(each, answers) for each in answers.unequal],
        "uniform": None if answers.uniform is None else [plan_facts(plan) for plan in answers.uniform],
        "shortage": answers.shortage or None,
        "note": EXECUTOR,
    }


def _facts(answer: Answer, answers: Answers) -> dict[str, Any]:
    pipeline = answer.pipeline
    return {
        "name": answer.name,
        "num_microbatches": answer.num_microbatches,
        "microbatch_size": answer.examples or None,
        "full_batch_s": answer.batch_s,
        "flushed_batch_s": answer.flushed_s,
        "num_devices": pipeline.num_devices,
        "peak_bytes": round(pipeline.memory_bytes),
        "fits": round(pipeline.memory_bytes) <= answers.memory_bytes,
        "stages": [
            {
                "first_layer": stage.first,
                "last_layer": stage.last,
                "replicas": stage.replicas,
                "tensor": stage.tensor,
                "recompute": [choice.recompute or "none" for choice in stage.choices],
                "microbatch_s": stage.seconds,
                "in_flight": stage.in_flight,
                "memory_bytes": round(stage.memory_bytes),
            }
            for stage in pipeline.stages
        ],
    }
