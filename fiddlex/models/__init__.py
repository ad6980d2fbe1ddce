"""Models: NNX modules, and the three parts (`embed`, `apply_layer`, a head) that training puts on a mesh."""

from fiddlex.config import Config
from fiddlex.models.bert import BERT
from fiddlex.models.gpt import GPT
from fiddlex.models.transformer import Model


def make_model(config: Config) -> Model:
    """The model of `config.model.family`."""
    return BERT(config) if config.model.family == "bert" else GPT(config)
