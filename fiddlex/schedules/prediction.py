"""Weight prediction: under a delay, batches run with an estimate of the weights that their gradients will update.

A stage with delay D runs batch b with a version made from W(b − D), and the gradient of the batch updates W(b). With
prediction, the version made from W(k) is W(k) + D p(k), where p(k) estimates one update:

- `extrapolate`: p(k) = a₁ Δ(k) + a₂ Δ(k − 1), where Δ(k) = W(k) − W(k − 1) is the last update. Order 1 repeats the last
  update: a₁ = 1 and a₂ = 0. Order 2 has a₁ = 1 + β and a₂ = −β, where β is the decay of the optimizer's momentum. Order
  2 is exact if two batches in a row add the same to the momentum. Among all predictions with a₁ + a₂ = 1, none is
  stable at learning rates more than 2% higher (docs/prediction.md).
- `momentum`: p(k) is the optimizer's next update, of order 1 for a gradient of zero, as in SpecTrain (Chen et al.,
  arXiv:1809.02839) and XPipe (Guan et al., arXiv:1911.04610), of order 2 for the last gradient once more.

`pipeline.prediction_scale` multiplies p. Before the first update, p is 0.
"""

import numpy as np

from fiddlex.config import Config
from fiddlex.errors import ConfigError
from fiddlex.schedules.semantics import Semantics


def coefficients(config: Config) -> tuple[float, ...]:
    """The factors of the last updates, newest first, that add up to p; for `momentum`, that of the next update."""
    pipeline, momentum = config.pipeline, config.optimizer.decay_of_momentum
    factors = (1 + momentum, -momentum) if pipeline.stores_last_update else (1.0,)
    return tuple(pipeline.prediction_scale * factor for factor in factors)


def stage_factors(config: Config, semantics: Semantics) -> np.ndarray:
    """What each stage multiplies its updates with, float32 [update, stage]: its delay times `coefficients`."""
    return np.outer(coefficients(config), semantics.delays).astype(np.float32)


def check_delays(config: Config, all_semantics: dict[str, Semantics]) -> None:
    """Raises ConfigError when weights are predicted, but no stage has a delay in any phase of the run."""
    if config.pipeline.prediction == "none" or any(max(each.delays) for each in all_semantics.values()):
        return
    raise ConfigError(
        f"pipeline.prediction={config.pipeline.prediction} with semantics {', '.join(all_semantics)}: every batch runs "
        "with the newest weights, so there is nothing to predict. Use pipeline.prediction=none, or semantics with a "
        "delay, as in pipeline.semantics=2bw."
    )
