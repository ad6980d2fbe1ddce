"""Prints how high a learning rate stays stable on a quadratic, for delayed and predicted weights and momenta.

    python -m experiments.stability [--momentum=0.9 --momentum=0.95 …]

The gradient of a quadratic of curvature λ is λ w. With momentum β as a mean of gradients, as in Adam, and gradients
taken at the sum of c₁ W(t − 1) + c₂ W(t − 2) + …, a step is W(t + 1) − W(t) = β (W(t) − W(t − 1)) − η (1 − β) λ Σ cᵢ
W(t − i). It shrinks any start if all roots of z^(n + 1) − (1 + β) zⁿ + β z^(n − 1) + η (1 − β) λ Σ cᵢ z^(n − i) lie in
the unit circle. The table has the largest ηλ up to which they do. docs/prediction.md discusses it.
"""

import math
from collections.abc import Sequence

import numpy as np
from absl import flags

from fiddlex.errors import ConfigError
from fiddlex.terminal.command_line import run

LARGEST = 1000.0  # no larger product of learning rate and curvature is tried
_MOMENTA = flags.DEFINE_multi_float("momentum", [0.0, 0.5, 0.8, 0.9, 0.95, 0.98], "decays of the momentum", 0, 0.999)


def main(argv: list[str]) -> None:
    """Prints the table."""
    momenta = _MOMENTA.value
    if any(math.isnan(momentum) for momentum in momenta):
        raise ConfigError("--momentum=nan is not a number from 0 to 0.999.")
    print(f"| gradient taken at | {' | '.join(f'β = {momentum:g}' for momentum in momenta)} |")
    print(f"|---|{'---:|' * len(momenta)}")
    print(f"| W(t) | {' | '.join(f'{2 * (1 + momentum) / (1 - momentum):.2f}' for momentum in momenta)} |")
    for name in predictions(0.0):
        bounds = (largest_stable(momentum, predictions(momentum)[name]) for momentum in momenta)
        print(f"| {name} | {' | '.join(f'{bound:.2f}' for bound in bounds)} |")
    best = [best_unbiased(momentum) for momentum in momenta]
    print(f"| the best a₁ + a₂ = 1 | {' | '.join(f'{bound:.2f} (a₁ = {factor:.2f})' for factor, bound in best)} |")


def predictions(momentum: float) -> dict[str, Sequence[float]]:
    """The factors of the last updates in each kind of prediction, newest first, for a delay of 1."""
    return {
        "W(t − 1): `none`": (),
        "`momentum`": (momentum,),
        "`extrapolate`": (1.0,),
        "`extrapolate`, scale 1.4": (1.4,),
        "order 2 of either": (1 + momentum, -momentum),
        "a₁ = 2, a₂ = −1, Newton's series": (2.0, -1.0),
    }


def largest_stable(momentum: float, factors: Sequence[float]) -> float:
    """The largest product ηλ up to which a quadratic shrinks, to six digits.

    Args:
      momentum: decay β of the mean of gradients.
      factors: what the last updates are multiplied with in the prediction, newest first.
    """
    points = np.zeros(len(factors) + 1)  # c₁, c₂, …
    points[0] = 1
    for age, factor in enumerate(factors):
        points[age] += factor
        points[age + 1] -= factor

    def is_stable(product: float) -> bool:
        polynomial = np.zeros(len(points) + 2)
        polynomial[:3] = 1, -(1 + momentum), momentum
        polynomial[2:] += product * (1 - momentum) * points
        return bool(np.abs(np.roots(polynomial)).max() <= 1 + 1e-9)

    tried = np.geomspace(1e-3, LARGEST, 2000)
    first = int(np.argmin([is_stable(product) for product in tried]))
    low, high = tried[first - 1], tried[first]
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if is_stable(middle) else (low, middle)
    return float(low)


def best_unbiased(momentum: float) -> tuple[float, float]:
    """The factor a₁ of the most stable prediction with a₁ + a₂ = 1, to a hundredth, and its largest ηλ."""
    return max(((a, largest_stable(momentum, (a, 1 - a))) for a in np.arange(0, 3, 0.01)), key=lambda pair: pair[1])


if __name__ == "__main__":
    run(main)
