"""The update rules, their learning-rate schedule and gradient clipping, built from optax transforms.

Only the statistics over whole tensors are our own (`fiddlex.train.step.blockwise`), because layers are stacked and the
embedding is padded. Invariant: the weights change as under optax's optimizer of the same name on unstacked, unpadded
weights. State leaves that mirror a weight (`mu`, `nu`, `trace`, Adafactor's `v`) are in trees of the weights' structure
and have the weight's shape. All other leaves are counters and Adafactor's factors, which have other shapes.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fiddlex.config import OptimizerConfig
from fiddlex.config.values.schedule_source import is_function
from fiddlex.train.step.blockwise import (
    Blocks,
    clip_by_block_rms,
    scale_by_factored_rms,
    scale_by_param_block_rms,
    scale_by_trust_ratio,
)
from fiddlex.train.step.muon import Deal, nesterov_momentum, orthogonalize
from fiddlex.train.step.own_rate import own_rate
from fiddlex.train.step.own_rule import own_rule

Apart = Callable[[optax.GradientTransformation], optax.GradientTransformation]


def make_optimizer(
    config: OptimizerConfig,
    *,
    num_steps: int,
    blocks: Blocks,
    deal: Deal = lambda rule, x: rule(x),
    apart: Apart = lambda rule: rule,
) -> optax.GradientTransformation:
    """The update rule of a validated config, for use under `jit` on global arrays; its `update` needs the weights.

    `deal` divides Muon's matrices among devices. `apart` gives a rule of the user's whole weights.

    With learning rate η_t, decay λ where a block says so, and m, v Adam's bias-corrected moments:

    ========= ========================================================================= ===============================
    adamw     w ← w − η_t (m / (√v + ε) + λ w)                                          Loshchilov & Hutter, ICLR 2019
    nadamw    as adamw, with β1 m + (1 − β1) g for m, each corrected for its bias       Dozat, ICLR 2016 workshop
    adam      w ← w − η_t m / (√v + ε), moments of g + λ w                              Kingma & Ba, ICLR 2015
    adan      w ← w − η_t ((m + (1 − β2) d) / (√n + ε) + λ w), d a mean of changes of g Xie et al., TPAMI 2024
    lion      w ← w − η_t (sign(β1 m + (1 − β1) g) + λ w), m a mean with β2             Chen et al., NeurIPS 2023
    muon      w ← w − η_t (0.2 √max(r, c) orthogonal(m) + λ w) for r × c matrices of    Jordan et al. 2024; Liu et al.
              layers, m Nesterov's momentum; all other weights as under adamw           2025; `fiddlex.train.step.muon`
    sgd       w ← w − η_t b, b ← momentum · b + g + λ w                                 the convention of PyTorch
    lamb      w ← w − η_t (‖w‖ / ‖u‖) u, u = m / (√v + ε) + λ w                         You et al., ICLR 2020
    adafactor w ← w − η_t (max(10⁻³, RMS(w)) clip(g / √v) + λ w), v factored, no moment Shazeer & Stern, ICML 2018
    ========= ========================================================================= ===============================

    A function of the user's (`fiddlex.train.step.own_rule`) turns g into a direction u: w ← w − η_t (u + λ w).

    Adafactor's learning rate is relative to the weights and its constants are the paper's, so it does not use `beta1`,
    `beta2` or `epsilon`. Its decay is multiplied by the learning rate, as AdamW's is; `optax.adafactor` does so only
    when it is given `weight_decay_rate` as a schedule. Gradients are clipped before (`clip_by_global_norm`).
    """
    rate = optax.scale_by_learning_rate(learning_rate_schedule(config, num_steps))
    decay = optax.add_decayed_weights(config.weight_decay, mask=jax.tree.map(lambda block: block.decay, blocks))
    if is_function(config.name):
        return optax.chain(apart(own_rule(config)), decay, rate)
    adam = optax.scale_by_adam(config.beta1, config.beta2, config.epsilon)
    nadam = optax.scale_by_adam(config.beta1, config.beta2, config.epsilon, nesterov=True)
    adan = optax.scale_by_adan(config.beta1, config.beta2, config.beta3, config.epsilon)
    momentum = optax.trace(config.momentum) if config.momentum else optax.identity()
    factored = (scale_by_factored_rms(blocks), clip_by_block_rms(blocks), scale_by_param_block_rms(blocks))
    rules = {
        "adamw": (adam, decay),
        "nadamw": (nadam, decay),
        "adan": (adan, decay),
        "lion": (optax.scale_by_lion(config.beta1, config.beta2), decay),
        "muon": (_muon(config.momentum, adam, blocks, deal), decay),
        "adam": (decay, adam),
        "sgd": (decay, momentum),
        "lamb": (adam, decay, scale_by_trust_ratio(blocks)),
        "adafactor": (*factored, decay),
    }
    return optax.chain(*rules[config.name], rate)


def _muon(
    momentum: float, others: optax.GradientTransformation, blocks: Blocks, deal: Deal
) -> optax.GradientTransformation:
    """Muon's direction for matrices of layers; that of the rule `others` for all other weights."""
    kinds = jax.tree.map(lambda block: "matrix" if block.matrix else "other", blocks)
    matrices = optax.chain(nesterov_momentum(momentum), orthogonalize(blocks, deal))
    return optax.partition({"matrix": matrices, "other": others}, kinds)


def num_updates(state: optax.OptState) -> jax.Array:
    """Number of updates that an optimizer of `make_optimizer` has made, int32 scalar; determines its learning rate."""
    assert isinstance(state, tuple)
    assert isinstance(state[-1], optax.ScaleByScheduleState)
    return state[-1].count


def learning_rate_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Linear warm-up, then decay: a function of the update count, an int or int32 array, to a float32 array.

    With peak p, final rate f, warm-up W and length D (`decay_steps`, or `num_steps` when that is 0), update c counted
    from 0 has the rate

    - p (c + 1) / W for c < W: never 0, and p at the last update of the warm-up;
    - f + (p − f) s(x) for W ≤ c < D, where x = (c − W) / (D − W) and s(x) is (1 + cos πx) / 2 for `cosine`
      (Loshchilov & Hutter, SGDR, ICLR 2017) and 1 − x for `linear`;
    - f for c ≥ D, W.

    With `constant`, the rate stays p after the warm-up; f and D are not used. A function of the user's gives all rates.
    """
    if is_function(config.schedule):
        return own_rate(config, num_steps)
    peak, final, warmup = config.learning_rate, config.final_learning_rate, config.warmup_steps
    end = config.decay_steps or num_steps

    def schedule(count: Any) -> jax.Array:
        count = jnp.asarray(count)
        progress = jnp.where(count < end, (count - warmup) / max(end - warmup, 1), 1.0)
        remaining = {
            "cosine": (1 + jnp.cos(jnp.pi * progress)) / 2,
            "linear": 1 - progress,
            "constant": jnp.ones_like(progress),
        }[config.schedule]
        # This form, unlike final + (peak − final)·remaining, rounds to exactly peak and final at the ends.
        decayed = remaining * peak + (1 - remaining) * final
        return jnp.where(count < warmup, peak * ((count + 1) / max(warmup, 1)), decayed)

    return schedule


def clip_by_global_norm(grads: optax.Updates, norm: jax.Array, clip_norm: float) -> optax.Updates:
    """Scales gradients of global norm `norm` by min(1, clip_norm / norm) (Pascanu et al., ICML 2013, algorithm 1).

    A `clip_norm` of 0 disables clipping. If `norm` is not a number, the result is not finite, so clipping never hides
    such an error.
    """
    if not clip_norm:
        return grads
    scale = clip_norm / jnp.maximum(norm, clip_norm)
    return jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
