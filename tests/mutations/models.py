"""Mutations of `fiddlex.models` and `fiddlex.parallel`: layers, dropout, vocabulary, collectives."""

from tests.mutations.mutation import Mutation

GRADIENTS = "tests/train/step/test_gradients.py::test_gradients_are_those_of_the_plain_model"
BERT, GPT = f"{GRADIENTS}[BERT]", f"{GRADIENTS}[GPT]"
MASKS = "tests/models/test_dropout.py::test_every_coordinate_draws_its_own_mask"
VOCABULARY = "tests/models/test_sharded_vocabulary.py::test_loss_and_gradients_equal_plain_ones"
KERNELS = "tests/models/test_kernels.py"
PACKED = "tests/train/test_bert.py::test_pieces_in_one_example_see_nothing_of_each_other_nor_padding"
HELDOUT = "tests/train/test_trainer.py::test_evaluation_scores_every_heldout_token_once[1f1b]"
LAYOUT = "tests/train/test_layouts.py::test_layout_trains_as_the_reference_does"
LLAMA = f"{LAYOUT}[2x2x2-llama-interleaved_1f1b-v2-m4-none-adamw-zero1-sync]"
SHARED_KEYS = "tests/models/test_llama.py::test_queries_share_keys_as_if_each_had_a_copy"
LLAMA_SHARED = f"{LAYOUT}[2x1x4-llama-1f1b-v1-m2-sp-none-lamb-zero1-sync]"
LLAMA_OPERATORS = "tests/models/test_llama.py::test_operators_have_the_gradients_of_their_formulas"
DROPOUT = "fiddlex/models/dropout.py"
SHARDED, COLLECTIVES = "fiddlex/models/sharded_vocabulary.py", "fiddlex/parallel/collectives.py"
PRODUCTS = "fiddlex/models/products.py"
MADE_AGAIN = (
    "tests/train/test_layouts.py::"
    "test_layout_trains_as_the_reference_does[2x1x2-gpt-1f1b-v1-m2-sp-gelunormsmasks-adamw-zero1-dropout-sync]"
)
RINGS, MATMUL = "fiddlex/models/rings.py", "fiddlex/models/collective_matmul.py"
BLOCKS = "fiddlex/models/blocks.py"
IN_PIECES = "tests/models/test_collective_matmul.py::test_products_in_pieces_are_those_of_the_whole_sequence"

MUTATIONS = (
    Mutation(
        "dropout-alike-in-all-layers",
        DROPOUT,
        old="number = site + SITES_PER_LAYER * self.layer if site else EMBEDDING_SITE",
        new="number = site",
        tests=(MASKS,),
    ),
    Mutation(
        "dropout-alike-in-all-steps",
        DROPOUT,
        old="    key = jax.random.fold_in(key, step)\n",
        new="",
        tests=(MASKS,),
    ),
    Mutation(
        "dropout-alike-in-all-examples",
        DROPOUT,
        old="jax.vmap(lambda example: jax.random.fold_in(key, example))(examples_B)",
        new="jax.vmap(lambda example: key)(examples_B)",
        tests=(MASKS,),
    ),
    Mutation(
        "dropout-alike-at-all-positions",
        DROPOUT,
        old="_fold(key, number, i)",
        new="_fold(key, number)",
        tests=(MASKS,),
    ),
    Mutation(
        "dropout-alike-in-all-parts-of-a-sequence",
        DROPOUT,
        old="first = first_position(length, axes)",
        new="first = 0",
        tests=("tests/models/test_dropout.py::test_cutting_the_sequence_changes_no_mask",),
    ),
    Mutation(
        "dropout-alike-in-the-heads-of-all-tensor-ranks",
        DROPOUT,
        old='lax.axis_index("tensor") * num_heads + jnp.arange(num_heads)',
        new="jnp.arange(num_heads)",
        tests=(BERT,),
    ),
    Mutation(
        "attention-sees-the-next-token",
        "fiddlex/models/attention.py",
        old="jnp.tril(jnp.ones((length, length), bool))",
        new="jnp.tril(jnp.ones((length, length), bool), 1)",
        tests=(GPT,),
    ),
    Mutation(
        "attention-does-not-see-segments",
        "fiddlex/models/attention.py",
        old="    if segments_BS is None:\n        return None",
        new="    if True:\n        return None",
        tests=(PACKED,),
    ),
    Mutation(
        "kernel-of-tpus-sees-the-next-token",
        "fiddlex/models/splash.py",
        old="masks.CausalMask if causal else masks.FullMask",
        new="masks.FullMask",
        tests=(KERNELS,),
    ),
    Mutation(
        "kernel-of-tpus-with-unscaled-gradients-of-queries",
        "fiddlex/models/splash.py",
        old="return scaled(dq_BSA), dk_BSA",
        new="return dq_BSA, dk_BSA",
        tests=(KERNELS,),
    ),
    Mutation(
        "kernel-of-tpus-does-not-see-segments",
        "fiddlex/models/splash.py",
        old="splash.SegmentIds(*segments_S * 2) if segments_S else None",
        new="None",
        tests=(KERNELS,),
    ),
    Mutation(
        "blocks-do-not-see-their-own-position",
        "fiddlex/models/blocked_attention.py",
        old="positions_E[self.queries, None] >= positions_E",
        new="positions_E[self.queries, None] > positions_E",
        tests=(KERNELS,),
    ),
    Mutation(
        "blocks-do-not-see-segments",
        "fiddlex/models/blocked_attention.py",
        old="        if segments_S is not None:\n            scores_GQE",
        new="        if False:\n            scores_GQE",
        tests=(KERNELS,),
    ),
    Mutation(
        "blocks-with-unscaled-gradients-of-scores",
        "fiddlex/models/blocked_attention.py",
        old="(of_scores_GQE / math.sqrt(q_GSD.shape[-1])).astype(dtype)",
        new="of_scores_GQE.astype(dtype)",
        tests=(KERNELS,),
    ),
    Mutation(
        "blocks-without-the-mean-of-the-gradients",
        "fiddlex/models/blocked_attention.py",
        old="(of_probabilities_GQE - means_GS[:, block.queries, None])",
        new="of_probabilities_GQE",
        tests=(KERNELS,),
    ),
    Mutation(
        "blocks-add-gradients-of-keys-at-the-wrong-place",
        "fiddlex/models/blocked_attention.py",
        old="part[start : start + size] for part in parts if len(part) > start",
        new="part[:size] for part in parts if len(part) > start",
        tests=(KERNELS,),
    ),
    Mutation(
        "kernel-of-tpus-stashes-its-result-twice",
        "fiddlex/models/splash.py",
        old="return y_BSA, (q_BSA, k_BSA, v_BSA, segments_BS, y_BSA, sums_BNS)",
        new="return y_BSA, (q_BSA, k_BSA, v_BSA, segments_BS, y_BSA + 0, sums_BNS)",
        tests=("tests/costs/test_device_memory.py::test_the_stash_of_the_kernel_of_tpus_is_counted_exactly",),
    ),
    Mutation(
        "positions-go-on-over-segments",
        "fiddlex/models/context.py",
        old="return indices_S - lax.cummax(starts_BS, axis=1)",
        new="return indices_S + 0 * starts_BS",
        tests=(PACKED,),
    ),
    Mutation(
        "gelu-with-a-wrong-slope",
        "fiddlex/models/operators.py",
        old="(1 + 3 * 0.044715 * x * x)",
        new="(1 + 2 * 0.044715 * x * x)",
        tests=(BERT,),
    ),
    Mutation(
        "layer-norm-gradient-without-the-variance",
        "fiddlex/models/operators.py",
        old="scaled.mean(axis=-1, keepdims=True) - normal * (scaled * normal).mean(axis=-1, keepdims=True)",
        new="scaled.mean(axis=-1, keepdims=True)",
        tests=(BERT,),
    ),
    Mutation(
        "rms-norm-gradient-without-the-variance",
        "fiddlex/models/operators.py",
        old="    centred = scaled - normal * (scaled * normal).mean(axis=-1, keepdims=True)\n",
        new="    centred = scaled\n",
        tests=(LLAMA_OPERATORS,),
    ),
    Mutation(
        "gate-without-its-own-gradient",
        "fiddlex/models/operators.py",
        old="slope = sigmoid * (1 + gate * (1 - sigmoid))",
        new="slope = sigmoid",
        tests=(LLAMA_OPERATORS,),
    ),
    Mutation(
        "gradient-of-rotated-keys-turned-the-wrong-way",
        "fiddlex/models/rotary.py",
        old="return _turned(g_BSND, positions_BS, frequencies, -1.0), None",
        new="return _turned(g_BSND, positions_BS, frequencies, 1.0), None",
        tests=(LLAMA_OPERATORS,),
    ),
    Mutation(
        "scaled-rotary-positions-without-the-factor",
        "fiddlex/models/rotary.py",
        old="(unscaled + (1 - unscaled) / model.rope_factor)",
        new="1",
        tests=(LLAMA,),
    ),
    Mutation(
        "queries-that-share-keys-in-another-order",
        "fiddlex/models/attention.py",
        old="q_BSND.reshape(batch, length, kv_heads, group, size).transpose(0, 3, 1, 2, 4)",
        new="q_BSND.reshape(batch, length, group, kv_heads, size).transpose(0, 2, 1, 3, 4)",
        tests=(SHARED_KEYS,),
    ),
    Mutation(
        "ranks-that-share-keys-take-the-first-head",
        "fiddlex/models/llama.py",
        old='lax.axis_index("tensor") // self._replicas',
        new='lax.axis_index("tensor") * 0',
        tests=(LLAMA_SHARED,),
    ),
    Mutation(
        "biases-of-queries-and-keys-left-out",
        "fiddlex/models/llama.py",
        old="map(biased, own, made)",
        new="made",
        tests=(f"{LAYOUT}[1x2x2-llamatied-zb_h1-v1-m4-31-selective-muon-zero1-dropout-2bw]",),
    ),
    Mutation(
        "a-table-of-its-own-not-used",
        "fiddlex/models/decoder.py",
        old='if self.config.tied_embeddings else weights["head"]["output"]',
        new="",
        tests=(f"{LAYOUT}[1x2x2-gptuntied-1f1b-v1-m2-none-adamw-zero1-sync]",),
    ),
    Mutation(
        "weights-ignored-in-the-loss",
        "fiddlex/models/decoder.py",
        old='return jnp.sum(cross_entropy(logits_BSV, batch["targets"]) * batch["weights"])',
        new='return jnp.sum(cross_entropy(logits_BSV, batch["targets"]))',
        tests=(GPT,),
    ),
    Mutation(
        "padding-scored-in-evaluation",
        "fiddlex/models/decoder.py",
        old='sums(losses_BS, batch["weights"], likeliest',
        new='sums(losses_BS, jnp.ones_like(batch["weights"]), likeliest',
        tests=(HELDOUT,),
    ),
    Mutation(
        "weights-ignored-in-the-masked-loss",
        "fiddlex/models/bert.py",
        old='total += jnp.sum(losses_BP * batch["weights"])',
        new="total += jnp.sum(losses_BP)",
        tests=(BERT,),
    ),
    Mutation(
        "initial-weights-follow-rows-in-place-of-layers",
        "fiddlex/models/model.py",
        old="jax.random.split(of_layers, network.num_layers)[numbers]",
        new="jax.random.split(of_layers, len(numbers))",
        tests=("tests/train/test_trainer.py::test_initial_weights_do_not_depend_on_the_layout",),
    ),
    Mutation(
        "vocabulary-offset-of-the-tensor-rank-alone",
        SHARDED,
        old="return lax.axis_index(VOCAB_AXES) * table_VH.shape[0]",
        new='return lax.axis_index("tensor") * table_VH.shape[0]',
        tests=(VOCABULARY,),
    ),
    Mutation(
        "padded-vocabulary-rows-scored",
        SHARDED,
        old="jnp.where(_rows(logits_BSV) < vocab_size, logits_BSV,",
        new="jnp.where(_rows(logits_BSV) <= vocab_size, logits_BSV,",
        tests=(VOCABULARY,),
    ),
    Mutation(
        "gradients-not-summed-over-data",
        COLLECTIVES,
        old='g = lax.psum_scatter(g, "data", scatter_dimension=dimension, tiled=True)',
        new="size = g.shape[dimension] // lax.axis_size('data')\n            "
        "g = lax.dynamic_slice_in_dim(g, lax.axis_index('data') * size, size, dimension)",
        tests=(BERT,),
    ),
    Mutation(
        "norm-gradients-averaged-over-tensor-under-sequence-parallelism",
        COLLECTIVES,
        old="return lax.psum(g, tuple(sorted(replicated))) if replicated else g",
        new="return lax.pmean(g, tuple(sorted(replicated))) if replicated else g",
        tests=(BERT,),
    ),
    Mutation(
        "masked-positions-of-the-first-tensor-rank-alone",
        COLLECTIVES,
        old="local_BP = positions_BP - first_position(length, axes)",
        new="local_BP = positions_BP",
        tests=(BERT,),
    ),
    Mutation(
        "zero1-shards-in-another-order-than-gradients",
        "fiddlex/parallel/sharding.py",
        old="names[chosen] = (*names[chosen], *axes)",
        new="names[chosen] = (*axes, *names[chosen])",
        tests=(BERT,),
    ),
    Mutation(
        "parts-of-the-other-way-taken-for-the-ranks-before",
        RINGS,
        old='(lax.axis_index("tensor") + way.shift * hops) %',
        new='(lax.axis_index("tensor") + hops) %',
        tests=(IN_PIECES,),
    ),
    Mutation(
        "sums-at-home-a-hop-early",
        RINGS,
        old="num_parts - 1 - step, length",
        new="num_parts - step, length",
        tests=(IN_PIECES,),
    ),
    Mutation(
        "blocks-in-the-order-of-the-ranks",
        BLOCKS,
        old="return jnp.moveaxis(x_KRBC, (2, 1, 0), (0, 1, 2))",
        new="return jnp.moveaxis(x_KRBC, 2, 0)",
        tests=(IN_PIECES,),
    ),
    Mutation(
        "sums-of-another-block",
        BLOCKS,
        old="x_BRKC[:, :, index]",
        new="x_BRKC[:, :, -index]",
        tests=(IN_PIECES,),
    ),
    Mutation(
        "gathered-again-without-the-gradient-of-the-second-kernel",
        PRODUCTS,
        old="return functools.reduce(jnp.add, of_each)",
        new="return next(of_each)",
        tests=(IN_PIECES,),
    ),
    Mutation(
        "an-input-made-again-without-its-own-gradient",
        PRODUCTS,
        old="    return pull(dx), dkernels",
        new="    return (dx, *pull(dx)[1:]), dkernels",
        tests=(MADE_AGAIN,),
    ),
    Mutation(
        "norms-saved-whatever-is-recomputed",
        "fiddlex/models/layers.py",
        old='return made if "norms" in context.recompute else made.saved()',
        new="return made.saved()",
        tests=(
            "tests/costs/test_stash.py::"
            "test_the_stash_of_a_layer_is_what_the_formulas_say[gpt-sequence-True-gelu,norms]",
        ),
    ),
    Mutation(
        "bits-of-a-mask-read-in-another-order",
        DROPOUT,
        old="return ((bits >> _PLACES) & 1)",
        new="return ((bits >> _PLACES[::-1]) & 1)",
        tests=("tests/models/test_dropout.py::test_masks_read_from_bits_are_those_drawn_again",),
    ),
    Mutation(
        "masks-of-attention-drawn-again-for-layer-0",
        "fiddlex/models/attention.py",
        old="return Dropout(rate, keys_B, layer).attention(by_head)",
        new="return Dropout(rate, keys_B).attention(by_head)",
        tests=(MADE_AGAIN,),
    ),
    Mutation(
        "a-kernels-own-lines-taken-for-the-end-of-a-computation",
        "fiddlex/xla/program_text.py",
        old="lines[-1] += line",
        new="lines.append(line)",
        tests=(
            "tests/xla/test_program_text.py::test_lines_of_a_kernel_end_neither_its_instruction_nor_the_computation",
        ),
    ),
)
