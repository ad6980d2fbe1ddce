"""GPT-2 (Radford et al. 2019): pre-LN decoder, learned positions."""

import jax

from fiddlex.models.decoder import Decoder
from fiddlex.models.layers import norm
from fiddlex.models.weights import Weights


class GPT(Decoder):
    """A `Decoder` with a final LayerNorm."""

    def last_norm(self, weights: Weights, x_BTH: jax.Array) -> jax.Array:
        return norm(weights["head"]["norm"], x_BTH, self.config.layer_norm_epsilon)
