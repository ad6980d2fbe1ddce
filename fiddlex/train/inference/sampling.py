"""Sampling text: temperature, top-k and top-p (nucleus, Holtzman et al., ICLR 2020) over next-token logits."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from fiddlex.config.rules import INTEGER_LIMIT
from fiddlex.data import Tokenizer, decode_pieces
from fiddlex.errors import ConfigError

NextLogits = Callable[
    [np.ndarray, np.ndarray], jax.Array
]  # tokens int32[rows, seq_len], positions int32[rows] → logits


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How the next token is drawn.

    Attributes:
      temperature: divides the logits; 0 always takes the likeliest token.
      top_k: only the k likeliest tokens may be drawn; 0 allows all tokens.
      top_p: only the likeliest tokens that together reach this probability may be drawn, at least one; 1 allows all
        tokens.
      seed: random seed of the draws, at least 0.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def validate(self) -> None:
        """Raises ConfigError when a value is out of its range."""
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature={self.temperature} must be at least 0 and finite.")
        if not 0 <= self.top_k < INTEGER_LIMIT:
            raise ConfigError(f"top_k={self.top_k} must be at least 0 and below {INTEGER_LIMIT}; 0 allows every token.")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p} must be above 0 and at most 1; 1 allows every token.")
        if not 0 <= self.seed < INTEGER_LIMIT:
            raise ConfigError(f"seed={self.seed} must be at least 0 and below {INTEGER_LIMIT}.")


@jax.enable_x64(False)
@jax.jit
def sample(key: jax.Array, logits_BV: jax.Array, temperature: float, top_k: int, top_p: float) -> jax.Array:
    """Draws one token for each row, int32 [B]; applies temperature, then top-k, then top-p (see `SamplingConfig`)."""
    order_BV = jnp.argsort(logits_BV, axis=-1, descending=True)
    # At temperature 0 the first token leads all others by an infinite margin.
    scaled_BV = jnp.take_along_axis(logits_BV, order_BV, axis=-1)
    scaled_BV = (scaled_BV - scaled_BV[:, :1]) / jnp.maximum(temperature, jnp.finfo(jnp.float32).tiny)
    ranks_V = jnp.arange(logits_BV.shape[-1])
    scaled_BV = jnp.where((top_k == 0) | (ranks_V < top_k), scaled_BV, -jnp.inf)
    probabilities_BV = jax.nn.softmax(scaled_BV, axis=-1)
    before_BV = jnp.cumsum(probabilities_BV, axis=-1) - probabilities_BV
    chosen_B = jax.random.categorical(key, jnp.where(before_BV < top_p, scaled_BV, -jnp.inf), axis=-1)
    return jnp.take_along_axis(order_BV, chosen_B[:, None], axis=-1)[:, 0]


def generate(
    next_logits: NextLogits,
    prompt: Sequence[int],
    num_tokens: int,
    *,
    seq_len: int,
    vocab_size: int,
    config: SamplingConfig,
) -> Iterator[int]:
    """Draws tokens one after another, each given the last `seq_len` tokens before it.

    Args:
      next_logits: the model's function from tokens and positions to next-token logits.
      prompt: the tokens to continue, at least one.
      num_tokens: how many to draw.
      seq_len: the model's context.
      vocab_size: number of tokens that the tokenizer knows; only these may be drawn.
      config: how to draw each token.

    Yields:
      The drawn tokens, without the prompt.

    Raises:
      ConfigError: when a sampling value is out of range, or the prompt is empty.
    """
    config.validate()
    if not len(prompt):
        raise ConfigError("The prompt is empty: give at least one token to start from.")
    key = jax.random.key(config.seed)
    tokens = list(prompt)
    for number in range(num_tokens):
        window = tokens[-seq_len:]
        padded = np.zeros((1, seq_len), np.int32)
        padded[0, : len(window)] = window
        logits_BV = next_logits(padded, np.asarray([len(window) - 1], np.int32))
        step_key = jax.random.fold_in(key, number)
        token = sample(step_key, logits_BV[:, :vocab_size], config.temperature, config.top_k, config.top_p)
        tokens.append(int(token[0]))
        yield tokens[-1]


def generate_text(
    next_logits: NextLogits,
    tokenizer: Tokenizer,
    prompt: str,
    num_tokens: int,
    *,
    seq_len: int,
    config: SamplingConfig,
) -> Iterator[str]:
    """`generate` for text: continues `prompt` and yields pieces of whole characters until the end of the document.

    With an empty prompt, the text is the start of a document.

    Raises:
      ConfigError: when a sampling value is out of range.
    """
    start = tokenizer.encode(prompt).tolist()
    drawn = generate(
        next_logits,
        start or [tokenizer.separator or 0],
        num_tokens,
        seq_len=seq_len,
        vocab_size=tokenizer.vocab_size,
        config=config,
    )
    document = itertools.takewhile(lambda token: token != tokenizer.separator, drawn)
    return decode_pieces(tokenizer, document, after=start)
