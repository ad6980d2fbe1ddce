"""From a config to the description of its network, and to what computes it (`fiddlex.config.families`).

Imports no model until one is asked for, so that descriptions are to be had without jax.
"""

import pkgutil
from typing import TYPE_CHECKING

from fiddlex.config import Config
from fiddlex.config.families import family
from fiddlex.models.spec import Network

if TYPE_CHECKING:
    from fiddlex.models.model import Model


def describe(config: Config) -> Network:
    """The description of the network of a config."""
    named = family(config.model.family).network
    network: Network = (pkgutil.resolve_name(named) if isinstance(named, str) else named)(config)
    return network


def make_model(config: Config) -> "Model":
    """What computes the network of a config."""
    named = family(config.model.family).model
    model: Model = (pkgutil.resolve_name(named) if isinstance(named, str) else named)(config)
    return model
