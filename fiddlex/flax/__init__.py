"""Flax and fiddlex: modules of your own as a family of models, and fiddlex's families as modules (docs/flax.md)."""

import pkgutil
from typing import TYPE_CHECKING, Any

from fiddlex.flax.family import family
from fiddlex.flax.models import GPT, Bert, Llama
from fiddlex.flax.parts import Loss
from fiddlex.flax.weights import state_of

if TYPE_CHECKING:
    from fiddlex.train.run.transfer.modules import load, save

__all__ = ["GPT", "Bert", "Llama", "Loss", "family", "load", "save", "state_of"]


def __getattr__(name: str) -> Any:
    """Finds `load` and `save`, which need what reads workdirs, and that imports this package."""
    if name in ("load", "save"):
        return pkgutil.resolve_name(f"fiddlex.train.run.transfer.modules:{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
