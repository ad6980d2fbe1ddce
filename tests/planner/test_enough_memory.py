"""When the memory of a machine or device is enough, and what is said where it is not."""

import functools

import pytest

from fiddlex.config import Config
from fiddlex.config.files import load_config
from fiddlex.config.overrides import replaced
from fiddlex.costs.backend import CPU, TPU
from fiddlex.errors import ConfigError
from fiddlex.planner.enough_memory import (
    COPIES,
    MOST_ABOVE,
    PROGRAM_BYTES,
    Free,
    Question,
    Use,
    Verdict,
    device_needs,
    judge,
    process_needs,
    worst,
)
from fiddlex.planner.predict import needed_memory

GIB = 2**30
STEP, ABOVE = Config(), int(1000 * (1 + MOST_ABOVE["cpu"]))


@pytest.mark.parametrize(
    ("need", "free", "verdict"),
    [
        (800, Free("", 1000), Verdict.ENOUGH),
        (801, Free("", 1000), Verdict.SCARCE),
        (ABOVE, Free("", 1000), Verdict.SCARCE),
        (ABOVE + 1, Free("", 1000), Verdict.TOO_LITTLE),
        (ABOVE + 1, Free("", 1000, swap=1), Verdict.SCARCE),
        (3000, Free("", 1000, swap=500), Verdict.TOO_LITTLE),
        (1, Free("", 0), Verdict.TOO_LITTLE),
    ],
)
def test_a_need_is_compared_with_what_is_free(need, free, verdict):
    assert judge(need, free, "cpu") is verdict


def test_the_refusal_leaves_room_for_the_largest_error_of_predictions():
    assert judge(1270, Free("", 1000), "tpu") is Verdict.SCARCE
    assert judge(1281, Free("", 1000), "tpu") is judge(1140, Free("", 1000), "gpu") is Verdict.TOO_LITTLE


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"model.seq_len": 1024},
        {"model.hidden_size": 512, "pipeline.recompute": "full"},
        {"mesh.data": 2, "mesh.pipe": 2, "pipeline.num_microbatches": 4},
        {"mesh.pipe": 2, "pipeline.num_microbatches": 4, "pipeline.semantics": "2bw"},
        {"pipeline.schedule": "zb_h1", "mesh.pipe": 2, "pipeline.num_microbatches": 4, "model.dtype": "bfloat16"},
    ],
)
@pytest.mark.parametrize("backend", [CPU, TPU])
def test_the_parts_at_the_peak_are_the_peak(fields, backend):
    config = replaced(STEP, fields).validate()
    memory = needed_memory(config, backend)
    assert sum(memory.at_peak.values()) == memory.peak
    assert memory.at_peak.items() <= memory.of_device.items()
    assert device_needs(config, backend, Use.MEASURING) == memory.at_peak
    scoring = sum(device_needs(config, backend, Use.SCORING).values())
    assert memory.weights < scoring < memory.peak


def test_a_process_needs_what_its_devices_need_and_a_copy_to_save():
    config = replaced(STEP, {"mesh.data": 4, "train.checkpoint_every": 10}).validate()
    memory = needed_memory(config, CPU)
    for num_processes in (1, 2, 4):
        needs = process_needs(config, Use.TRAINING, num_processes=num_processes)
        assert needs["weights"] == 4 // num_processes * memory.weights
        # With ZeRO-1 each device has its own fourth of most of the state.
        assert needs["checkpoint"] == pytest.approx(
            COPIES * 4 * (memory.weights + memory.optimizer) / num_processes, 0.01
        )
        assert needs["program"] == PROGRAM_BYTES
        saves_nothing = process_needs(config, Use.MEASURING, num_processes=num_processes)
        assert saves_nothing == {name: size for name, size in needs.items() if name != "checkpoint"}
    whole = replaced(config, {"optimizer.zero1": False}).validate()
    assert process_needs(whole, Use.TRAINING, num_processes=1)["checkpoint"] == pytest.approx(
        needs["checkpoint"] * 4, 0.01
    )
    with pytest.raises(ConfigError, match="3 processes cannot share 4 devices equally"):
        process_needs(config, Use.TRAINING, num_processes=3)


def asked(free: Free, platform: str = "cpu", use: Use = Use.TRAINING, **fields: object) -> Question:
    """A question about gpt_tiny with other fields."""
    wide = {"model.hidden_size": 1024, "model.num_heads": 16}
    config = replaced(load_config("gpt_tiny"), wide | {name.replace("_", ".", 1): x for name, x in fields.items()})
    if platform == "cpu":
        needs_of = functools.partial(process_needs, use=use, num_processes=free.num_processes)
    else:
        needs_of = functools.partial(device_needs, backend=TPU, use=use)
    return Question(config.validate(), use, platform, free, needs_of(config), needs_of)


def test_too_little_memory_is_told_with_figures():
    question = asked(Free("in control group /docker/3f2", GIB))
    assert question.verdict is Verdict.TOO_LITTLE
    assert question.text() == (
        "Training is predicted to need 2.93 GiB of memory for all fake devices together, and 1.00 GiB is free in "
        "control group /docker/3f2. In GiB: checkpoint 0.85, stash 0.43, optimizer 0.38, compute_weights 0.38, "
        "gradients 0.38, weights 0.19, working 0.18, program 0.093, inboxes 0.039. --force goes on all the same.\n"
        "What may help, with what is then needed: end other programs that use the memory; raise "
        "pipeline.num_microbatches (at most 8): 2.7 GiB; set pipeline.recompute=gelu,norms: 2.8 GiB; set "
        "pipeline.recompute=full: 2.6 GiB; set mesh.data=1 and pipeline.num_microbatches=8: 2.0 GiB; train a smaller "
        "model (docs/memory.md#before-memory-runs-out)."
    )
    assert "--force was given: it goes on.\n" in question.text(forced=True)


def test_scarce_memory_is_told_with_figures():
    assert asked(Free("on the machine", 2 * GIB, swap=GIB), pipeline_recompute="full").text() == (
        "Training is predicted to need 2.62 GiB of memory for all fake devices together, and 2.00 GiB is free on the "
        "machine, besides 1.00 GiB of swap space. In GiB: checkpoint 0.85, optimizer 0.38, compute_weights 0.38, "
        "gradients 0.38, working 0.26, weights 0.19, program 0.093, stash 0.039, inboxes 0.039. It goes on, and may "
        "end for lack of memory.\n"
        "What may help, with what is then needed: end other programs that use the memory; raise "
        "pipeline.num_microbatches (at most 8): 2.5 GiB; set mesh.data=1 and pipeline.num_microbatches=8: 1.9 GiB; "
        "train a smaller model (docs/memory.md#before-memory-runs-out)."
    )


def test_processes_that_share_a_memory_need_it_together():
    one, two = asked(Free("on the machine", GIB)), asked(Free("on the machine", GIB, num_processes=2))
    assert two.need == one.need + PROGRAM_BYTES
    text = " GiB of memory for all fake devices of 2 processes together, and 1.00 GiB is free on the machine. In GiB: "
    assert text in two.text()


def test_a_device_is_told_of_its_own_memory():
    assert asked(Free("on a TPU v5e", GIB // 4), platform="tpu").text() == (
        "Training is predicted to need 0.21 GiB of memory on each device, and 0.25 GiB is free on a TPU v5e. In GiB: "
        "optimizer 0.048, gradients 0.048, stash 0.039, working 0.025, compute_weights 0.024, weights 0.024, inboxes "
        "0.0049. It goes on, and may end for lack of memory.\n"
        "What may help, with what is then needed: raise pipeline.num_microbatches (at most 8): 0.19 GiB; set "
        "pipeline.recompute=gelu,norms: 0.2 GiB; set pipeline.recompute=full: 0.18 GiB; set "
        "pipeline.stash_memory=host: 0.2 GiB; set optimizer.offload=True: 0.17 GiB; raise mesh.tensor; train a "
        "smaller model (docs/memory.md#before-memory-runs-out)."
    )


def test_what_does_not_change_an_evaluation_is_not_proposed_for_it():
    assert asked(Free("on the machine", GIB // 8), use=Use.SCORING).text() == (
        "Evaluating is predicted to need 0.67 GiB of memory for all fake devices together, and 0.12 GiB is free on the "
        "machine. In GiB: compute_weights 0.38, weights 0.19, program 0.093. --force goes on all the same.\n"
        "What may help, with what is then needed: end other programs that use the memory; set mesh.data=1 and "
        "pipeline.num_microbatches=8: 0.28 GiB (docs/memory.md#before-memory-runs-out)."
    )


def test_the_memory_that_is_least_enough_is_told():
    enough, scarce, little = (asked(Free(where, size)) for where, size in (("a", 99 * GIB), ("b", 3 * GIB), ("c", GIB)))
    swapped = asked(Free("d", GIB // 2, swap=99 * GIB))
    assert scarce.verdict is swapped.verdict is Verdict.SCARCE
    assert worst([enough, scarce, little, swapped]) is little
    assert worst([swapped, enough, scarce]) is swapped
    assert worst([enough]) is worst([]) is None
