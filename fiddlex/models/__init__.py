"""Models: NNX modules, and the three parts (`embed`, `apply_layer`, `loss`) that training puts on a mesh."""

from fiddlex.config import Config
from fiddlex.models.gpt import GPT


def make_model(config: Config) -> GPT:
    """The model of `config.model.family`."""
    return GPT(config)
