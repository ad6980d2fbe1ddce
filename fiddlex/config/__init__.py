"""The configuration of a run, and the command line that reads it."""

from fiddlex.config.config import Config
from fiddlex.config.sections import (
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PipelineConfig,
    TrainConfig,
)

__all__ = ["Config", "DataConfig", "MeshConfig", "ModelConfig", "OptimizerConfig", "PipelineConfig", "TrainConfig"]
