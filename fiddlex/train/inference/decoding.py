"""Incremental decoding: compiled passes that read prompts, and then one new token of each text.

Every pass returns the logits of the next token. The devices keep the keys and values of all earlier tokens
(`fiddlex.models.cache`), so a new token costs the work of one position, plus attention. All texts pass through the
pipeline as one microbatch: a pass over few tokens takes the time of reading the weights, which more microbatches would
read again. Texts lie right-aligned in the slots of the cache; what precedes a shorter text is padding, which no token
sees.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fiddlex.cluster.jax_settings import fixed_settings
from fiddlex.cluster.together import compiled_by_all
from fiddlex.config import Config
from fiddlex.config.families import family
from fiddlex.config.overrides import replaced
from fiddlex.errors import ConfigError
from fiddlex.models.decoder import Decoder
from fiddlex.models.weights import Weights
from fiddlex.parallel.axes import MESH_AXES
from fiddlex.parallel.sharding import BATCH, named
from fiddlex.pipeline.executor import decode
from fiddlex.pipeline.stage import Cache
from fiddlex.schedules.lowering import lower
from fiddlex.schedules.ticks import forward_schedule
from fiddlex.train.step.gradients import compute_weights, parts, pipeline_model
from fiddlex.train.step.program import Program
from fiddlex.train.step.state import WeightLayout

CACHE = P("pipe", "data", None, "tensor", None)  # [row, text, slot, head, head size]
SLOT_AXIS = 2
LOGITS = P("data", MESH_AXES["vocab"])
SMALLEST_LENGTH = 16  # of a prompt with its padding, in tokens
SLOTS_AT_ONCE = 64  # slots are allotted in multiples, so that few programs serve all lengths


def make_decoding(program: Program) -> "Decoding":
    """The passes of a program's model; raises ConfigError when the model does not predict the next token."""
    model = program.config.model
    if not family(model.family).attends:
        raise ConfigError(
            f"model.family={model.family} cannot go on with a text: its layers keep no keys and values of earlier "
            "tokens. It can be trained and evaluated; to generate, apply its modules to the run's weights."
        )
    if not isinstance(program.model, Decoder):
        raise ConfigError(
            f"model.objective={model.task} cannot go on with a text: it predicts no next token. Sample "
            "from a model with model.objective=lm."
        )
    return Decoding(program.model, program.config, mesh=program.mesh, layout=program.layout)


class DecodingState(NamedTuple):
    """What a pass over new tokens needs of the tokens before."""

    cache: list[jax.Array]  # keys and values in the compute dtype, each with the axes and the sharding of `CACHE`
    starts_B: jax.Array  # int32 [text], the slot of each text's first token
    slot: jax.Array  # int32 scalar, the slot of the next token of all texts


class Decoding:
    """The passes of a model on a mesh; jax compiles one for each number of texts, padded length and number of slots."""

    def __init__(self, model: Decoder, config: Config, *, mesh: Mesh, layout: WeightLayout):
        self.seq_len = config.model.seq_len  # the most tokens of a text that the model sees
        self._config, self._mesh, self._layout = config, mesh, layout
        self._dtype = jnp.dtype(config.model.dtype)
        attention = model.network.attention
        self._heads, self._head_size = attention.kv_width // attention.head_size, attention.head_size
        # One new token cannot be divided along the sequence.
        whole = replaced(config, {"mesh.sequence_parallel": False, "mesh.collective_matmul": False})
        piped = pipeline_model(model, whole, mesh, model.next_logits)
        self._piped, self._lowered = piped, lower(forward_schedule(layout.placement.stage_ranks, num_microbatches=1))
        cast = functools.partial(compute_weights, dtype=self._dtype, mesh=mesh, layout=layout)
        self._cast = jax.jit(cast, in_shardings=(layout.master_shardings(mesh),))
        prefill = jax.jit(self._first_pass, static_argnames="num_slots")
        step = jax.jit(self._next_pass, donate_argnames="state")
        self._prefill = compiled_by_all(prefill, "the first texts to go on")
        self._step = compiled_by_all(step, "the first token to generate")

    def num_rows(self, num_texts: int) -> int:
        """The number of texts that a pass takes for `num_texts`: a multiple of mesh.data."""
        return -(-num_texts // self._config.mesh.data) * self._config.mesh.data

    def length(self, longest: int) -> int:
        """The padded length of texts, in tokens; `longest` is the length of the longest of them."""
        return min(max(SMALLEST_LENGTH, 2 ** (longest - 1).bit_length()), max(self.seq_len, longest))

    @fixed_settings()
    def weights(self, master: Weights) -> Weights:
        """The weights that the passes take: a copy of master weights in the compute dtype, whole on every replica."""
        weights: Weights = self._cast(master)
        return weights

    @fixed_settings()
    def prefill(
        self, weights: Weights, texts: Sequence[Sequence[int]], num_new: int = 0
    ) -> tuple[DecodingState, jax.Array]:
        """Reads texts from their first tokens on.

        `texts` are `num_rows` texts of 1 to `seq_len` tokens, `num_new` is the number of later calls of `step`, and
        `weights` are what the method of this name returns.

        Returns:
          The state after the texts, and the logits of their next tokens, float32 [text, padded vocabulary], sharded as
          `LOGITS`; the padding has the lowest float.
        """
        length = self.length(max(map(len, texts)))
        tokens_BT = np.zeros((len(texts), length), np.int32)
        for row, text in zip(tokens_BT, texts, strict=True):
            row[length - len(text) :] = text
        starts_B = np.asarray([length - len(text) for text in texts], np.int32)
        num_slots = -(-(length + num_new) // SLOTS_AT_ONCE) * SLOTS_AT_ONCE if num_new else length
        found: tuple[DecodingState, jax.Array] = self._prefill(weights, tokens_BT, starts_B, num_slots=num_slots)
        return found

    @fixed_settings()
    def step(self, weights: Weights, state: DecodingState, tokens_B: jax.Array) -> tuple[DecodingState, jax.Array]:
        """Reads one more token of each text, int32 [text]; returns what `prefill` returns, and donates `state`."""
        found: tuple[DecodingState, jax.Array] = self._step(weights, state, tokens_B)
        return found

    def _first_pass(
        self, weights: Weights, tokens_BT: jax.Array, starts_B: jax.Array, *, num_slots: int
    ) -> tuple[DecodingState, jax.Array]:
        new, logits_BV = self._pass(weights, [], tokens_BT, starts_B, jnp.int32(0))
        room = num_slots - tokens_BT.shape[1]
        cache = [jnp.pad(leaf, [(0, room if axis == SLOT_AXIS else 0) for axis in range(leaf.ndim)]) for leaf in new]
        return DecodingState(cache, starts_B, jnp.int32(tokens_BT.shape[1])), logits_BV

    def _next_pass(
        self, weights: Weights, state: DecodingState, tokens_B: jax.Array
    ) -> tuple[DecodingState, jax.Array]:
        new, logits_BV = self._pass(weights, state.cache, tokens_B[:, None], state.starts_B, state.slot)
        cache = [
            jax.lax.dynamic_update_slice_in_dim(leaf, value, state.slot, SLOT_AXIS)
            for leaf, value in zip(state.cache, new, strict=True)
        ]
        return DecodingState(cache, state.starts_B, state.slot + 1), logits_BV

    def _pass(
        self,
        weights: Weights,
        earlier: list[jax.Array],
        tokens_BT: jax.Array,
        starts_B: jax.Array,
        slot: jax.Array,
    ) -> tuple[list[jax.Array], jax.Array]:
        """The keys and values of the new tokens, like `DecodingState.cache`, and the logits after them."""

        def local(
            weights: Weights, held: Cache, tokens_BT: jax.Array, starts_B: jax.Array, slot: jax.Array
        ) -> tuple[list[jax.Array], jax.Array]:
            slots_BT = jnp.broadcast_to(slot + jnp.arange(tokens_BT.shape[1], dtype=jnp.int32), tokens_BT.shape)
            batch = {"tokens": tokens_BT, "slots": slots_BT, "starts": starts_B}
            placement = self._layout.placement
            logits_1BV, new = decode(self._lowered, placement, self._piped, parts(weights), batch, held)
            return new, logits_1BV[0]

        shape = (len(self._layout.placement.layers), *tokens_BT.shape, self._heads, self._head_size)
        sharding = named(self._mesh, CACHE)
        empty = [jax.lax.with_sharding_constraint(jnp.zeros(shape, self._dtype), sharding) for _ in ("keys", "values")]
        specs = (self._layout.compute, Cache([CACHE] * len(earlier), [CACHE, CACHE]), BATCH, BATCH, P())  # type: ignore[list-item]
        mapped = jax.shard_map(local, mesh=self._mesh, in_specs=specs, out_specs=([CACHE, CACHE], LOGITS))
        found: tuple[list[jax.Array], jax.Array] = mapped(weights, Cache(earlier, empty), tokens_BT, starts_B, slot)
        return found
