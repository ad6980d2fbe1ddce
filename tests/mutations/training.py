"""Mutations of `fiddlex.train`: steps, optimizers, records."""

from tests.mutations.mutation import Mutation

GRADIENTS = "tests/train/step/test_gradients.py::test_gradients_are_those_of_the_plain_model"
BERT, GPT = f"{GRADIENTS}[BERT]", f"{GRADIENTS}[GPT]"
OLDER = "tests/train/test_semantics.py::test_each_older_version_of_the_weights_is_saved_and_resumed_in_its_place"
LAGGING = "tests/train/test_semantics.py::test_phases_of_a_run_lose_no_microbatch[2bw-delays3]"
OVERFLOWING = "tests/train/test_semantics.py::test_float16_leaves_out_updates_that_overflow_and_no_others[sync]"
RESUMED = "tests/train/test_semantics.py::test_float16_resumes_with_its_scales"
SCALING = "tests/train/step/test_scaling.py"
PLAIN_OPTAX = "tests/train/step/test_optimizer.py::test_stacked_and_padded_equals_plain_optax"
STEP, GRADIENT, STATE = (
    "fiddlex/train/step/train_step.py",
    "fiddlex/train/step/gradients.py",
    "fiddlex/train/step/state.py",
)
OPTIMIZER, BLOCKWISE = "fiddlex/train/step/optimizer.py", "fiddlex/train/step/blockwise.py"
VERSIONS, LAYOUTS = (
    "fiddlex/train/step/versions.py",
    "tests/train/test_layouts.py::test_layout_trains_as_the_reference_does",
)
MOMENTUM = f"{LAYOUTS}[2x3x1-mlmpre-zb_h2-v1-m2-121-none-adamw-zero1-dropout-delay:3-momentum21]"
ADAM = f"{LAYOUTS}[1x2x2-mlmpre-interleaved_1f1b-v2-m4-1211-selective-adam-zero1-dropout-2bw-extrapolate21]"
SAMPLING = "fiddlex/train/inference/sampling.py"
GENERATION, CACHE = "fiddlex/train/inference/generation.py", "fiddlex/models/cache.py"

UPDATED = "tests/train/step/test_update.py::test_an_update_from_the_host_equals_one_on_the_devices"
UPDATE, HOST_MEMORY = "fiddlex/train/step/update.py", "fiddlex/parallel/host_memory.py"

SETTINGS = "tests/train/test_trainer.py::test_the_settings_of_jax_change_no_bit_of_a_run"

MUTATIONS = (
    # An update from the memory of the host.
    Mutation(
        "last-row-updated-twice",
        HOST_MEMORY,
        old="    return written(changed, new, number - 1), other\n",
        new="    return written(changed, new, number - 2), other\n",
        tests=(f"{UPDATED}[three rows-adamw]",),
    ),
    Mutation(
        "rows-fetched-late",
        HOST_MEMORY,
        old="following = rows((changed, read), index + 1)",
        new="following = rows((changed, read), index)",
        tests=(f"{UPDATED}[three rows-adamw]",),
    ),
    Mutation(
        "skipped-update-made-on-the-host",
        UPDATE,
        old="            self._good, (before, state), (optax",
        new="            jnp.bool(True), (before, state), (optax",
        tests=(f"{UPDATED}[three rows-adamw]",),
    ),
    Mutation(
        "gradients-from-the-host-not-clipped",
        UPDATE,
        old="self._rule.update(self._clip(_only(self._path, grad)), state, before)",
        new="self._rule.update(_only(self._path, grad), state, before)",
        tests=(f"{UPDATED}[three rows-adamw]",),
    ),
    Mutation(
        "last-weight-alone-finite",
        UPDATE,
        old="changed, other = (weight, mapped), (counters, finite)",
        new="changed, other = (weight, mapped), (counters, jnp.int32(1))",
        tests=("tests/train/step/test_update.py::test_an_update_from_the_host_finds_a_weight_that_is_not_finite",),
    ),
    # A batch's gradient.
    Mutation(
        "microbatches-summed-in-place-of-averaged",
        "fiddlex/train/step/flushed.py",
        old="scale=share * scale, stream",
        new="scale=share * scale * config.pipeline.num_microbatches, stream",
        tests=(GPT,),
    ),
    Mutation(
        "mean-over-each-replica-alone",
        GRADIENT,
        old='sums = (lax.psum(batch[name].sum(), "data") for name in names)',
        new="sums = (batch[name].sum() for name in names)",
        tests=(BERT,),
    ),
    Mutation(
        "dropout-alike-in-all-replicas",
        GRADIENT,
        old='rows = lax.axis_index("data") * math.prod(shape) + jnp.arange(math.prod(shape))',
        new="rows = jnp.arange(math.prod(shape))",
        tests=(BERT,),
    ),
    Mutation(
        "labels-weighted-as-tokens",
        GRADIENT,
        old="batch[name] * (first / total)",
        new="batch[name] * 1.0",
        tests=(BERT,),
    ),
    # Norm, clipping, loss scale.
    Mutation(
        "tied-table-counted-twice-in-the-norm",
        "fiddlex/train/step/measures.py",
        old="return optax.tree.norm(grads), found",
        new='return optax.tree.norm((grads, grads["embedding"]["tokens"])), found',
        tests=(LAGGING,),
    ),
    Mutation(
        "clipping-left-out",
        STEP,
        old="clip = functools.partial(clip_by_global_norm, norm=norm, clip_norm=config.optimizer.clip_norm)",
        new="clip = functools.partial(clip_by_global_norm, norm=norm, clip_norm=0.0)",
        tests=(LAGGING,),
    ),
    Mutation(
        "small-gradients-clipped-up",
        OPTIMIZER,
        old="scale = clip_norm / jnp.maximum(norm, clip_norm)",
        new="scale = clip_norm / norm",
        tests=("tests/train/step/test_optimizer.py::test_clip_equals_optax",),
    ),
    Mutation(
        "gradients-not-unscaled",
        STEP,
        old="lambda g: g / state.scaling.scales[0], grads",
        new="lambda g: g, grads",
        tests=(OVERFLOWING,),
    ),
    Mutation(
        "count-of-updates-goes-on-where-one-is-left-out",
        UPDATE,
        old="jax.tree.map(lambda a, b: jnp.where(good, b, a), before, after)",
        new="jax.tree.map(lambda a, b: jnp.where(good, b, a) if a.ndim else b, before, after)",
        tests=(OVERFLOWING, RESUMED),
    ),
    Mutation(
        "learning-rate-told-of-steps-in-place-of-updates",
        STEP,
        old="learning_rate(num_updates(state.optimizer))",
        new="learning_rate(state.step)",
        tests=(RESUMED,),
    ),
    Mutation(
        "loss-scale-halved-twice",
        "fiddlex/train/step/scaling.py",
        old="jnp.minimum(newest, scaling.scales[0] / 2)",
        new="newest / 2",
        tests=(SCALING,),
    ),
    Mutation(
        "loss-scale-doubled-every-step-after-the-window",
        "fiddlex/train/step/scaling.py",
        old="jnp.where(grows, 0, good_steps)",
        new="good_steps",
        tests=(SCALING,),
    ),
    # Optimizers.
    Mutation(
        "norms-and-biases-decay",
        "fiddlex/models/spec.py",
        old='{"bias": Parameter(shape[num_inputs:], axes[num_inputs:])}',
        new='{"bias": Parameter(shape[num_inputs:], axes[num_inputs:], decays=True)}',
        tests=("tests/train/step/test_state.py",),
    ),
    Mutation(
        "decay-times-the-learning-rate-twice",
        OPTIMIZER,
        old="optax.add_decayed_weights(config.weight_decay, mask",
        new="optax.add_decayed_weights(config.weight_decay * config.learning_rate, mask",
        tests=("tests/train/step/test_optimizer.py::test_decoupled_decay_shrinks_what_the_blocks_say",),
    ),
    Mutation(
        "adamw-decays-through-its-moments",
        OPTIMIZER,
        old='"adamw": (adam, decay),',
        new='"adamw": (decay, adam),',
        tests=("tests/train/step/test_optimizer.py::test_decoupled_decay_shrinks_what_the_blocks_say",),
    ),
    Mutation(
        "warm-up-off-by-one-step",
        OPTIMIZER,
        old="peak * ((count + 1) / max(warmup, 1))",
        new="peak * (count / max(warmup, 1))",
        tests=("tests/train/step/test_optimizer.py::test_schedule_at_its_corners",),
    ),
    Mutation(
        "decay-of-the-rate-off-by-one-step",
        OPTIMIZER,
        old="(count - warmup) / max(end - warmup, 1)",
        new="(count + 1 - warmup) / max(end - warmup, 1)",
        tests=("tests/train/step/test_optimizer.py::test_schedule_at_its_corners",),
    ),
    Mutation(
        "lamb-norms-over-all-layers-together",
        BLOCKWISE,
        old="jax.vmap(scale_one)(update, weight) if block.stacked else scale_one(update, weight)",
        new="scale_one(update, weight)",
        tests=(f"{PLAIN_OPTAX}[0.1-lamb]",),
    ),
    Mutation(
        "adafactor-factors-over-layers",
        BLOCKWISE,
        old="sorted(range(int(block.stacked), len(shape)), key=sizes.__getitem__)[-2:]",
        new="sorted(range(len(shape)), key=sizes.__getitem__)[-2:]",
        tests=("tests/train/step/test_optimizer.py::test_factored_axes",),
    ),
    Mutation(
        "adafactor-counts-padding",
        BLOCKWISE,
        old="jnp.square(x), axis=axes, keepdims=True) * block.padding)",
        new="jnp.square(x), axis=axes, keepdims=True))",
        tests=(f"{PLAIN_OPTAX}[0.1-adafactor]",),
    ),
    # Going on after an interruption.
    Mutation(
        "batch-skipped-on-resume",
        "fiddlex/train/step/feed.py",
        old="contextlib.closing(self._iterate(start_step))",
        new="contextlib.closing(self._iterate(start_step + (start_step > 0)))",
        tests=(RESUMED,),
    ),
    Mutation(
        "batch-repeated-on-resume",
        "fiddlex/train/step/feed.py",
        old="contextlib.closing(self._iterate(start_step))",
        new="contextlib.closing(self._iterate(max(start_step - 1, 0)))",
        tests=(RESUMED,),
    ),
    Mutation(
        "window-counted-from-the-start-of-the-run-after-a-resume",
        "fiddlex/train/step/window_sequence.py",
        old="_repeated(windows, step - max(begun, self._restarted))",
        new="_repeated(windows, step - begun)",
        tests=(RESUMED,),
    ),
    Mutation(
        "older-weights-all-the-youngest-on-resume",
        VERSIONS,
        old="found = saved.older.get(name, found)",
        new="found = saved.older.get(name) if found is None else found",
        tests=(OLDER,),
    ),
    # Predicted weights.
    Mutation(
        "weights-predicted-for-one-update-whatever-the-delay",
        "fiddlex/schedules/prediction.py",
        old="np.outer(coefficients(config), semantics.delays)",
        new="np.outer(coefficients(config), np.minimum(semantics.delays, 1))",
        tests=(MOMENTUM,),
    ),
    Mutation(
        "second-order-without-the-momentum",
        "fiddlex/schedules/prediction.py",
        old="(1 + momentum, -momentum)",
        new="(2.0, -1.0)",
        tests=(f"{LAYOUTS}[1x2x1-gpt-gpipe-v1-m2-full-sgd-zero1-2bw-extrapolate20.7]",),
    ),
    Mutation(
        "last-update-forgotten",
        VERSIONS,
        old="[update.change, dict(versions.last_update)]",
        new="[update.change, update.change]",
        tests=(ADAM,),
    ),
    Mutation(
        "head-predicted-as-far-as-the-embedding",
        VERSIONS,
        old="Factors(each[:, stages], each[:, 0], each[:, -1])",
        new="Factors(each[:, stages], each[:, 0], each[:, 0])",
        tests=(f"{LAYOUTS}[2x2x1-gpt-interleaved_1f1b-v2-m4-none-lamb-zero1-dropout-stash-extrapolate11]",),
    ),
    Mutation(
        "momentum-of-the-step-before",
        VERSIONS,
        old="self._optimizer.update(*lax.optimization_barrier((expected, state.optimizer, state.weights)))[0]",
        new="update.change",
        tests=(f"{LAYOUTS}[2x2x2-gpt-interleaved_1f1b-v2-m4-sp-none-adamw-zero1-vertical_sync-momentum11]",),
    ),
    Mutation(
        "second-order-of-momentum-without-the-gradient",
        VERSIONS,
        old="expected = update.grads if self._order > 1 else",
        new="expected = update.grads if self._order > 2 else",
        tests=(MOMENTUM,),
    ),
    Mutation(
        "queries-keys-and-values-one-matrix",
        "fiddlex/models/spec.py",
        old="tuple(range(num_inputs + separate, len(shape)))",
        new="tuple(range(num_inputs, len(shape)))",
        tests=(f"{LAYOUTS}[2x2x2-gpt-1f1b-v1-m4-31-sp-selective-muon-zero1-2bw-extrapolate11.4]",),
    ),
    Mutation(
        "muon-for-the-embedding-too",
        STATE,
        old="matrix=parameter.matrix if stacked else None",
        new="matrix=parameter.matrix",
        tests=("tests/train/step/test_state.py",),
    ),
    Mutation(
        "decisions-saved-without-a-copy",
        "fiddlex/train/sync_switch.py",
        old='"losses": list(self._losses)',
        new='"losses": self._losses',
        tests=("tests/train/test_sync_switch.py",),
    ),
    Mutation(
        "records-of-steps-to-come-kept-on-resume",
        "fiddlex/train/run/records/metrics.py",
        old='if record["step"] <= step and "goodput" not in record:',
        new='if "goodput" not in record:',
        tests=("tests/train/run/records/test_metrics.py::test_records_of_steps_that_are_trained_again_are_dropped",),
    ),
    # Text.
    Mutation(
        "top-p-keeps-one-token-too-few",
        SAMPLING,
        old="before_BV = jnp.cumsum(probabilities_BV, axis=-1) - probabilities_BV",
        new="before_BV = jnp.cumsum(probabilities_BV, axis=-1)",
        tests=("tests/train/inference/test_sampling.py::test_frequencies_follow_the_distribution",),
    ),
    Mutation(
        "top-k-keeps-one-token-too-many",
        SAMPLING,
        old="(ranks_V < top_k)",
        new="(ranks_V <= top_k)",
        tests=("tests/train/inference/test_sampling.py::test_frequencies_follow_the_distribution",),
    ),
    Mutation(
        "text-goes-on-after-the-end-of-the-document",
        GENERATION,
        old="if int(token) in self._ends:",
        new="if False:",
        tests=(
            "tests/train/inference/test_generation.py::test_text_comes_in_whole_characters_and_ends_with_the_document",
        ),
    ),
    Mutation(
        "a-stop-string-in-two-pieces-is-shown",
        GENERATION,
        old="held = 0 if self._end else max(",
        new="held = 0 if True else max(",
        tests=("tests/train/inference/test_generation.py::test_a_text_ends_before_the_first_stop_string",),
    ),
    Mutation(
        "the-cache-outlives-the-window",
        GENERATION,
        old="longest + number <= decoding.seq_len:",
        new="longest + number <= decoding.seq_len + 1:",
        tests=("tests/train/inference/test_generation.py::test_the_window_slides",),
    ),
    Mutation(
        "rows-draw-alike",
        SAMPLING,
        old="jax.random.fold_in(key, row)",
        new="key",
        tests=("tests/train/inference/test_sampling.py::test_a_row_draws_the_same_in_any_batch",),
    ),
    Mutation(
        "a-text-sees-the-padding-before-it",
        CACHE,
        old=" & (slots_B1S >= self.starts_B[:, None, None])",
        new="",
        tests=("tests/train/inference/test_decoding.py::test_logits_are_those_of_whole_texts",),
    ),
    Mutation(
        "a-position-counts-the-padding",
        CACHE,
        old="self.slots_BT - self.starts_B[:, None]",
        new="self.slots_BT",
        tests=("tests/train/inference/test_decoding.py::test_logits_are_those_of_whole_texts",),
    ),
    Mutation(
        "keys-are-written-one-slot-too-late",
        "fiddlex/train/inference/decoding.py",
        old="(leaf, value, state.slot, SLOT_AXIS)",
        new="(leaf, value, state.slot + 1, SLOT_AXIS)",
        tests=("tests/train/inference/test_decoding.py::test_logits_are_those_of_whole_texts",),
    ),
    Mutation(
        "random-numbers-of-the-process-generator",
        "fiddlex/cluster/jax_settings.py",
        old='jax.random.wrap_key_data(jnp.asarray([0, seed], jnp.uint32), impl="threefry2x32")',
        new="jax.random.key(seed)",
        tests=(SETTINGS,),
    ),
    Mutation(
        "random-numbers-of-the-process-partitioning",
        "fiddlex/cluster/jax_settings.py",
        old="        jax.threefry_partitionable(True),\n",
        new="",
        tests=(SETTINGS,),
    ),
    Mutation(
        "loss-per-byte-of-text-that-was-not-scored",
        "fiddlex/data/dataset.py",
        old="num_scored + 1 < len(text)",
        new="len(text) < num_scored",
        tests=("tests/train/inference/test_evaluation.py::test_the_loss_per_byte_is_that_of_the_text_that_was_scored",),
    ),
    Mutation(
        "points-of-tensorboard-lost-with-the-process",
        "fiddlex/train/run/records/tensorboard.py",
        old="    file.flush()\n",
        new="",
        tests=(
            "tests/train/run/records/test_metrics.py::test_tensorboard_has_each_record_of_a_process_that_is_killed",
        ),
    ),
    Mutation(
        "other-data-under-another-path-taken",
        "fiddlex/train/run/workdir.py",
        old="if digest == kept.get(name)}",
        new="if name in kept}",
        tests=("tests/train/run/test_workdir.py::test_data_under_another_path_are_those_of_the_run_by_their_digest",),
    ),
    Mutation(
        "scales-fixed-later-where-fewer-batches-are-in-flight",
        "fiddlex/train/step/program.py",
        old="start_scaling(config.optimizer, self.layout.pipeline.delay)",
        new="start_scaling(config.optimizer, self.source.max_batches - 1)",
        tests=("tests/train/test_semantics.py::test_float16_skips_the_same_updates_whatever_the_layout",),
    ),
    Mutation(
        "fields-that-no-optimizer-uses-taken",
        "fiddlex/config/sections.py",
        old="momentum: float = field(0.9, MOMENTUM)",
        new="momentum: float = 0.9",
        tests=("tests/config/test_unused.py",),
    ),
    Mutation(
        "windows-that-end-without-a-loss-go-on",
        "fiddlex/train/sync_switch.py",
        old="        if step % self._window or not self._losses:",
        new="        if step % self._window or loss is None:",
        tests=("tests/train/test_sync_switch.py::test_decisions_follow_from_the_means_of_windows",),
    ),
)
