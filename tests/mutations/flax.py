"""Mutations of `fiddlex.flax`: modules as functions, their description, and what tensor ranks have of a layer."""

from tests.mutations.mutation import Mutation

FLAX = "tests/flax/test_family.py::test_every_layout_trains_as_plain_flax_does"
SHARED = "tests/flax/test_tensor_ranks.py::test_ranks_together_compute_what_one_device_does"
CHOSEN = "tests/flax/test_tensor_ranks.py::test_a_block_without_annotations_is_shared_as_in_megatron[2-Block-float32]"
OPERATIONS, PARTITION = "fiddlex/flax/operations.py", "fiddlex/flax/partition.py"
MODELS, TREES = "tests/flax/test_models.py", "tests/train/run/transfer/test_trees.py"

WHOLE = "tests/flax/test_vocabulary.py::test_a_vocabulary_is_shared_or_whole_and_losses_are_those_of_one_device"
LOSSES = "tests/models/test_new_family.py::test_losses_of_layers_are_added"

MUTATIONS = (
    Mutation(
        "flax-loss-of-a-layer-without-gradient",
        "fiddlex/pipeline/layer_losses.py",
        old="as_varying_over(weights_B2[:, 1].sum(), axes)",
        new="as_varying_over(0 * weights_B2[:, 1].sum(), axes)",
        tests=(f"{LOSSES}[sync]",),
    ),
    Mutation(
        "flax-loss-sown-in-training-alone-taken",
        "fiddlex/flax/traced.py",
        old="if outside != training:",
        new="if False:",
        tests=("tests/flax/test_refused_modules.py::test_what_a_pipeline_cannot_run_is_told",),
    ),
    Mutation(
        "flax-losses-of-layers-of-the-batch-before",
        "fiddlex/pipeline/continuous.py",
        old="losses=later[1])",
        new="losses=carry.losses)",
        tests=(f"{LOSSES}[2bw]",),
    ),
    Mutation(
        "flax-padding-of-a-vocabulary-scored",
        "fiddlex/flax/model.py",
        old="return without_padding(logits_BSV, self.config.vocab_size)",
        new="return logits_BSV",
        tests=(f"{WHOLE}[257]",),
    ),
    Mutation(
        "flax-vocabulary-without-equal-parts-shared",
        "fiddlex/flax/family.py",
        old="grown if has_equal_parts else",
        new="grown if True else",
        tests=(f"{WHOLE}[counted, 257]",),
    ),
    Mutation(
        "flax-rows-of-the-first-rank-looked-up",
        "fiddlex/flax/alone.py",
        old="inputs[1] = indices - lax.axis_index(axes.parts) * size",
        new="inputs[1] = indices",
        tests=(f"{SHARED}[table-whole]",),
    ),
    Mutation(
        "flax-clipped-rows-dropped",
        "fiddlex/flax/alone.py",
        old="if mode == lax.GatherScatterMode.CLIP or (is_lookup and not fills):",
        new="if is_lookup and mode == lax.GatherScatterMode.PROMISE_IN_BOUNDS:",
        tests=(f"{SHARED}[table-whole]",),
    ),
    Mutation(
        "flax-rows-beyond-a-table-of-zeros",
        "fiddlex/flax/alone.py",
        old="    if not fills:\n        return result\n",
        new="    if True:\n        return result\n",
        tests=(f"{SHARED}[table-whole]",),
    ),
    Mutation(
        "flax-inner-calls-as-one-operation",
        "fiddlex/flax/alone.py",
        old='"pjit", "closed_call", ',
        new='"pjit", ',
        tests=(f"{SHARED}[chunks-whole]",),
    ),
    Mutation(
        "flax-gradient-of-a-table-of-whole-rows",
        PARTITION,
        old="rule = rule_making(equation, place) or rule",
        new="rule = rule",
        tests=("tests/flax/test_vocabulary.py::test_no_device_has_a_whole_table_or_gradient_or_all_logits[nnx]",),
    ),
    Mutation(
        "flax-dropout-alike-in-all-layers",
        "fiddlex/flax/model.py",
        old="lambda key: jax.random.fold_in(key, number)",
        new="lambda key: jax.random.fold_in(key, 0)",
        tests=(f"{FLAX}[2x2x1-nnx-interleaved_1f1b-v2-m4-none-sgd-zero1-dropout-2bw-extrapolate20.7]",),
    ),
    Mutation(
        "flax-scan-begins-with-a-constant",
        "fiddlex/flax/alone.py",
        old="    last = first + num_carry\n",
        new="    last = first + num_carry + 1\n",
        tests=(f"{SHARED}[scan-whole]",),
    ),
    Mutation(
        "flax-products-of-activations-left-out",
        "fiddlex/costs/sizes.py",
        old="for each in operation.inner)",
        new="for each in operation.products[:0])",
        tests=("tests/flax/test_family.py::test_flops_and_parameters_are_those_of_the_same_gpt",),
    ),
    Mutation(
        "flax-random-constants-taken",
        "fiddlex/flax/parts.py",
        old="if not all(jnp.array_equal(a, b, equal_nan=True) for a, b in leaves):",
        new="if False:",
        tests=("tests/flax/test_refused_modules.py::test_what_a_pipeline_cannot_run_is_told",),
    ),
    Mutation(
        "flax-part-of-a-reshaped-array-anywhere",
        OPERATIONS,
        old="and (place.pieces == 1 or outside in starts[:i])",
        new="or place.pieces == 1",
        tests=(f"{SHARED}[heads-whole]",),
    ),
    Mutation(
        "flax-operation-along-parts",
        OPERATIONS,
        old="if place.dimension in along:",
        new="if False:",
        tests=(f"{SHARED}[pieces-whole]",),
    ),
    Mutation(
        "flax-sliced-parts-taken-for-whole",
        OPERATIONS,
        old="if start % size or limit - start != size:",
        new="if False:",
        tests=(f"{SHARED}[pieces-whole]",),
    ),
    Mutation(
        "flax-sums-exchanged-for-each-reader",
        PARTITION,
        old="if any(place == SUM and name in summed for",
        new="if any(False and name in summed for",
        tests=(CHOSEN,),
    ),
    Mutation(
        "flax-sums-of-wider-terms",
        OPERATIONS,
        old="after.itemsize <= before.itemsize",
        new="after.itemsize",
        tests=(CHOSEN.replace("2-Block-float32", "4-Block-bfloat16"),),
    ),
    Mutation(
        "flax-weights-travel-to-positions",
        OPERATIONS,
        old="key=lambda each: (not each[0].yields, ",
        new="key=lambda each: (True, ",
        tests=(CHOSEN.replace("2-Block-float32", "4-Block-bfloat16"),),
    ),
    Mutation(
        "flax-sums-of-positions-brought-together",
        PARTITION,
        old="streams.get(shape_of(name)) if place == SUM",
        new="None if place == SUM",
        tests=(CHOSEN,),
    ),
    Mutation(
        "flax-sum-of-positions-for-each-term",
        PARTITION,
        old="(kinds == {SUM, True} and made_first in added)",
        new="(kinds == {SUM, True} and False)",
        tests=(CHOSEN.replace("2-Block-float32", "4-PostNorm-bfloat16"),),
    ),
    Mutation(
        "flax-gradients-of-positions-taken-for-whole",
        PARTITION,
        old="or (terms and place is None)",
        new="or (terms and False)",
        tests=(f"{SHARED}[megatron-sequence parallel]", f"{SHARED}[whole bias-sequence parallel]"),
    ),
    Mutation(
        "flax-exchange-of-a-config-s-own-mesh",
        "fiddlex/planner/cost_model.py",
        old="return network_of(dataclasses.replace(self._config, mesh=mesh))",
        new="return network_of(self._config)",
        tests=("tests/flax/test_family.py::test_the_exchange_of_its_tensor_ranks_is_that_of_the_same_gpt",),
    ),
    Mutation(
        "flax-cut-beside-the-smallest",
        "fiddlex/flax/saved.py",
        old="if number not in reaches and number + 1 in reaches]",
        new="if name in sinks]",
        tests=("tests/flax/test_saved.py::test_a_cut_is_the_smallest_from_which_the_sinks_are_made",),
    ),
    Mutation(
        "flax-arrays-saved-that-elementwise-work-makes",
        "fiddlex/flax/saved.py",
        old="return stays and equation.primitive.name in FUSED",
        new="return stays and equation.primitive.name == 'mul'",
        tests=("tests/flax/test_saved.py::test_arrays_that_follow_by_elementwise_work_are_made_again",),
    ),
    Mutation(
        "stashed-arrays-changed-by-elementwise-work-left-for-weights",
        "fiddlex/pipeline/residuals.py",
        old='only=FUSED | {"pvary"}',
        new="only=set()",
        tests=(
            "tests/flax/test_saved.py::test_no_part_of_a_backward_pass_leaves_what_elementwise_work_makes_of_the_stash",
        ),
    ),
    Mutation(
        "flax-weights-chosen-one-by-one",
        PARTITION,
        old="return places if further == places else followed(further)",
        new="return places",
        tests=(CHOSEN,),
    ),
    Mutation(
        "queries-of-a-run-taken-for-keys-of-a-module",
        "fiddlex/flax/weights.py",
        old='{"qkv": ("q", "k", "v")}',
        new='{"qkv": ("k", "q", "v")}',
        tests=(f"{MODELS}::test_decoders_compute_what_runs_compute[gpt]",),
    ),
    Mutation(
        "positions-of-a-module-counted-from-1",
        "fiddlex/flax/models.py",
        old="jnp.tril(same_BSS, -1)",
        new="jnp.tril(same_BSS, 0)",
        tests=(f"{MODELS}::test_bert_computes_what_runs_compute[mlm_nsp]",),
    ),
    Mutation(
        "a-named-checkpoint-passed-over-for-the-newest",
        "fiddlex/train/run/checkpoints/checkpoint.py",
        old="reversed(steps if only is None else [only])",
        new="reversed(steps)",
        tests=(f"{MODELS}::test_a_plain_loop_trains_as_a_run_does",),
    ),
    Mutation(
        "arrays-left-over-in-a-tree-of-flax-passed-over",
        "fiddlex/train/run/transfer/trees.py",
        old="for path, each in arrays.items() if path not in wanted]",
        new="for path, each in arrays.items() if path not in arrays]",
        tests=(f"{TREES}::test_what_does_not_fit_is_named",),
    ),
    Mutation(
        "rows-of-a-checkpoint-taken-for-layers-in-order",
        "fiddlex/train/run/transfer/trees.py",
        old="    if (folder.parent / META).is_dir():\n",
        new="    if (folder / META).is_dir():\n",
        tests=(f"{TREES}::test_plain_orbax_reads_what_a_run_saves",),
    ),
)
