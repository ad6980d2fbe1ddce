"""The layouts and changes of experiments/predicted_steps.py, and the steps from which its profile is fitted."""

import dataclasses
from typing import Any

from fiddlex.config import Config, MeshConfig, ModelConfig, PipelineConfig
from fiddlex.planner.fit import Calibration

MICROBATCH_SIZE = 2
DEVICES = (2, 4)  # numbers of devices at which sharing is measured
ENTRIES = ("none", "full")  # pipeline.recompute of the profile's entries; the first also gives sharing and ticks


def make_config(
    name: str, mesh: MeshConfig | None = None, pipeline: PipelineConfig | None = None, **changes: Any
) -> tuple[str, Config]:
    """The name of a layout, and the config of the study's model in that layout."""
    mesh, pipeline = mesh or MeshConfig(), pipeline or PipelineConfig(num_microbatches=4)
    model = ModelConfig(num_layers=8, hidden_size=256, num_heads=4, seq_len=128, vocab_size=512)
    config = Config(model=dataclasses.replace(model, **changes), mesh=mesh, pipeline=pipeline)
    config.data.global_batch_size = mesh.data * pipeline.num_microbatches * MICROBATCH_SIZE
    config.train.num_steps = 10_000  # enough that no pipeline drains during the measurement
    return name, config


INTERLEAVED = "interleaved_1f1b"
CASES = dict(
    [
        make_config("one device", pipeline=PipelineConfig(num_microbatches=8)),
        make_config("data=4", MeshConfig(data=4), PipelineConfig(num_microbatches=2)),
        make_config("data=2, tensor=2", MeshConfig(data=2, tensor=2)),
        make_config("pipe=4", MeshConfig(pipe=4), PipelineConfig(num_microbatches=8)),
        make_config("data=2, pipe=2", MeshConfig(data=2, pipe=2)),
        make_config("pipe=2, tensor=2", MeshConfig(pipe=2, tensor=2)),
        make_config("data=2, pipe=2, tensor=2", MeshConfig(2, 2, 2)),
        make_config("pipe=2, interleaved, v=2", MeshConfig(pipe=2), PipelineConfig(INTERLEAVED, 2, 4)),
        make_config("pipe=4, interleaved, v=2", MeshConfig(pipe=4), PipelineConfig(INTERLEAVED, 2, 8)),
        make_config("pipe=4, zb_h1", MeshConfig(pipe=4), PipelineConfig("zb_h1", 1, 8)),
        make_config("pipe=4, gpipe", MeshConfig(pipe=4), PipelineConfig("gpipe", 1, 8)),
        make_config("pipe=2, recompute=full", MeshConfig(pipe=2), PipelineConfig("1f1b", 1, 4, recompute="full")),
        make_config("pipe=2, 2bw", MeshConfig(pipe=2), PipelineConfig("1f1b", 1, 4, semantics="2bw")),
        make_config("pipe=4, 2bw", MeshConfig(pipe=4), PipelineConfig("1f1b", 1, 8, semantics="2bw")),
        make_config("BERT, pipe=2", MeshConfig(pipe=2), family="bert"),
        make_config("data=8, two layers", MeshConfig(data=8), num_layers=2),
        make_config("data=8, two layers, m=1", MeshConfig(data=8), PipelineConfig(num_microbatches=1), num_layers=2),
    ]
)
WHAT_IFS = [  # layout, change
    ("pipe=4", "recompute=full"),
    ("pipe=4", "semantics=2bw"),
    ("pipe=4", "schedule=zb_h1"),
    ("pipe=4", "num_microbatches=16"),
    ("pipe=4", "mesh.pipe=2"),
    ("one device", "optimizer=sgd"),
    ("one device", "recompute=full"),
    ("data=4", "zero1=false"),
    ("pipe=2, tensor=2", "sequence_parallel=true"),
]


def make_calibrations() -> list[Calibration]:
    """The measurements from which the profile is fitted: one calibration for each of its entries."""
    configs = [make_config("", pipeline=PipelineConfig(num_microbatches=4, recompute=each))[1] for each in ENTRIES]
    return [Calibration.of(config, () if number else DEVICES) for number, config in enumerate(configs)]
