"""The configuration of a run: its sections, the rules for their values, and config files."""

from fiddlex.config.config import Config
from fiddlex.config.data_section import DataConfig
from fiddlex.config.sections import MeshConfig, ModelConfig, OptimizerConfig, PipelineConfig
from fiddlex.config.train_section import TrainConfig

__all__ = ["Config", "DataConfig", "MeshConfig", "ModelConfig", "OptimizerConfig", "PipelineConfig", "TrainConfig"]
