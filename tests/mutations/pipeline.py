"""Mutations of `fiddlex.pipeline`: schedules, their tables, and what runs them."""

from tests.mutations.mutation import Mutation

LOWERED = "tests/schedules/test_lowering.py::test_run_by_hand_every_gradient_is_right_and_added_once"
WINDOWS = "tests/schedules/test_windows.py::test_run_by_hand_every_read_is_right"
SPILLS = "tests/schedules/test_lowering.py::test_a_table_with_spills_by_hand"
SPILLED = (
    "tests/train/test_layouts.py::test_a_stash_on_the_host_trains_alike[1x4x1-gpt-zb_h2-v1-m8-2111-none-sgd-zero1-sync]"
)
STREAMED = (
    "tests/train/test_layouts.py::test_layout_trains_as_the_reference_does"
    "[2x2x2-gpt-breadth_first-v3-m4-211121-sp-gelunorms-adamwstreams-zero1-dropout-sync]"
)
STREAMING = (
    "tests/schedules/test_weight_stream.py::test_weights_are_there_when_they_are_used_and_each_gradient_goes_once"
)
NORM = "tests/train/test_weights_on_hosts.py::test_norm_and_flags_of_gradients_are_the_same_wherever_they_are"
RULES = "tests/schedules/test_validate.py::test"
GRADIENTS = "tests/train/step/test_gradients.py::test_gradients_are_those_of_the_plain_model"
GPT = f"{GRADIENTS}[GPT]"
LAGGING = "tests/train/test_semantics.py::test_phases_of_a_run_lose_no_microbatch[2bw-delays3]"
AGO = "tests/train/test_semantics.py::test_losses_of_one_batch_over_and_over_are_those_of_the_weights_one_update_ago"
OVERFLOWING = "tests/train/test_semantics.py::test_float16_leaves_out_updates_that_overflow_and_no_others[2bw]"
STREAMS = "fiddlex/schedules/weight_stream.py"
LOWERING, TICKS = "fiddlex/schedules/lowering.py", "fiddlex/schedules/ticks.py"
WINDOWING, ENGINE = "fiddlex/schedules/windows.py", "fiddlex/pipeline/engine.py"
RESIDUALS, CODEC = "fiddlex/pipeline/residuals.py", "fiddlex/pipeline/codec.py"
ENCODED = "tests/pipeline/test_codec.py::test"
STAGE, VALIDATE = "fiddlex/pipeline/stage.py", "fiddlex/schedules/validate.py"

MUTATIONS = (
    # The table: slots, ticks, windows.
    Mutation(
        "slot-reused-in-the-tick-of-its-last-read",
        LOWERING,
        old="while taken and taken[0][0] < begins:",
        new="while taken and taken[0][0] // len(TickPhase) <= begins // len(TickPhase):",
        tests=(LOWERED,),
    ),
    Mutation(
        "inbox-slot-reused-a-tick-early",
        LOWERING,
        old='self._moment("forward_inbox", tick[forwards])',
        new='self._moment("forward_inbox", tick[forwards] - 1)',
        tests=(LOWERED,),
    ),
    Mutation(
        "stash-given-up-before-the-weight-gradient",
        LOWERING,
        old="np.where(weights >= 0, by_weight, by_input)",
        new="by_input",
        tests=(LOWERED,),
    ),
    Mutation(
        "fetched-slot-taken-a-tick-late",
        LOWERING,
        old='self._moment("fetch_stash", waits.fetch)',
        new='self._moment("fetch_stash", waits.fetch + 1)',
        tests=("tests/schedules/test_lowering.py::test_two_slots_are_enough_for_1f1b_if_it_spills",),
    ),
    Mutation(
        "host-slot-given-up-before-its-fetch",
        LOWERING,
        old='self._moment("fetch_host", fetches)',
        new='self._moment("fetch_host", fetches - 1)',
        tests=(LOWERED, SPILLS),
    ),
    Mutation(
        "spills-after-the-next-forward",
        LOWERING,
        old='side="right" if after else "left"',
        new='side="left"',
        tests=(SPILLS,),
    ),
    Mutation(
        "fetches-are-numbered-from-the-first-batch",
        WINDOWING,
        old='for slot in ("forward", "backward", "weight", "spill", "fetch")',
        new='for slot in ("forward", "backward", "weight", "spill")',
        tests=("tests/schedules/test_windows.py::test_2bw_spills_as_a_flushed_batch_does",),
    ),
    Mutation(
        "fetch-from-the-trash",
        "fiddlex/pipeline/host_stash.py",
        old="jnp.where(slot == NONE, len(array) - 1, slot)",
        new="len(array) - 1 + 0 * slot",
        tests=(SPILLED,),
    ),
    Mutation(
        "spill-of-the-slot-after",
        ENGINE,
        old="source=own.spill_stash, target=own.spill_host",
        new="source=own.spill_stash + 1, target=own.spill_host",
        tests=(SPILLED,),
    ),
    Mutation(
        "weights-arrive-before-their-place-is-free",
        STREAMS,
        old="(chunk, begins[chunk + 1], begins[chunk])",
        new="(chunk, begins[chunk + 1] - 2, begins[chunk])",
        tests=(STREAMING,),
    ),
    Mutation(
        "gradients-go-before-they-are-complete",
        STREAMS,
        old="(chunk, ends[chunk] - 1, ends[chunk - 1] - 1)",
        new="(chunk, ends[chunk] - 2, ends[chunk - 1] - 1)",
        tests=(STREAMING,),
    ),
    Mutation(
        "early-stores-copy-what-is-stored-already",
        STREAMS,
        old="following = np.minimum.accumulate(places[::-1])[::-1]",
        new="following = np.minimum.accumulate(places[::-1])[::-1].clip(max=len(stores) - 2)",
        tests=(STREAMING,),
    ),
    Mutation(
        "the-last-two-chunks-come-again",
        STREAMS,
        old="for chunk in back[2:]]",
        new="for chunk in back[3:]]",
        tests=(STREAMING,),
    ),
    Mutation(
        "rows-arrive-in-the-place-of-the-chunk-that-runs",
        "fiddlex/pipeline/streamed_weights.py",
        old="in_turn(first, turn) % number",
        new="(in_turn(first, turn) + number // 2) % number",
        tests=(STREAMED,),
    ),
    Mutation(
        "the-first-chunks-gradient-stays-behind",
        "fiddlex/pipeline/streamed_weights.py",
        old="gradients = _stored(gradients, carry, 0, rows_per_chunk)",
        new="gradients = _stored(gradients, carry, 0, 1)",
        tests=(STREAMED,),
    ),
    Mutation(
        "norm-leaves-out-rows-of-the-host",
        "fiddlex/train/step/measures.py",
        old="total += squares.sum()",
        new="total += squares[1:].sum()",
        tests=(NORM,),
    ),
    Mutation(
        "gradient-finished-at-its-first-microbatch",
        LOWERING,
        old="np.diff(each[order], append=-1)",
        new="np.diff(each[order], prepend=-1)",
        tests=(LAGGING,),
    ),
    Mutation(
        "forwards-run-one-further-ahead",
        TICKS,
        old="self._cap = 2 * peak - 1 if",
        new="self._cap = 2 * peak if",
        tests=(
            "tests/schedules/test_ticks.py::test_forwards_that_move_ahead_hold_less_than_twice_the_peak",
            "tests/schedules/test_lowering.py::test_stash_of_1f1b_does_not_grow_with_the_microbatches",
        ),
    ),
    Mutation(
        "forward-does-not-wait-for-its-update",
        TICKS,
        old="return batch - delay <= self._done",
        new="return batch - delay <= self._done + 1",
        tests=(WINDOWS,),
    ),
    Mutation(
        "weight-version-off-by-one-microbatch",
        WINDOWING,
        old="delays[chunk[busy, rank]] - microbatch[busy, rank] // size",
        new="delays[chunk[busy, rank]] - (microbatch[busy, rank] + 1) // size",
        tests=(WINDOWS,),
    ),
    Mutation(
        "head-scores-with-the-newest-weights",
        WINDOWING,
        old="version[busy] = semantics.delays[stage] - microbatch[busy] // size",
        new="version[busy] = 0",
        tests=(AGO,),
    ),
    Mutation(
        "slots-in-flight-not-renamed",
        WINDOWING,
        old="        renames.append(rename)",
        new="        renames.append(_same(lowered, size))",
        tests=(WINDOWS,),
    ),
    Mutation(
        "last-window-starts-the-next-batch",
        WINDOWING,
        old="dropped = table[..., COLUMNS[name]] >= microbatch",
        new="dropped = table[..., COLUMNS[name]] > microbatch",
        tests=("tests/schedules/test_windows.py::test_the_last_window_of_a_run_starts_nothing_of_the_next_batch",),
    ),
    Mutation(
        "stashed-weights-lag-on-the-wrong-end",
        "fiddlex/schedules/semantics.py",
        old="Semantics(tuple(reversed(range(num_stages))), batch_size)",
        new="Semantics(tuple(range(num_stages)), batch_size)",
        tests=("tests/schedules/test_windows.py::test_delays_are_those_of_the_papers",),
    ),
    # The engine: what a device computes.
    Mutation(
        "weight-version-one-place-off",
        ENGINE,
        old="return (self.step - age) % size if size > 1 else 0",
        new="return (self.step - age + 1) % size if size > 1 else 0",
        tests=(AGO,),
    ),
    Mutation(
        "layer-gradients-not-emptied-between-batches",
        ENGINE,
        old="sums = lax.fori_loop(0, done, empty_row, sums)",
        new="sums = lax.fori_loop(0, done * 0, empty_row, sums)",
        tests=(LAGGING,),
    ),
    Mutation(
        "outer-gradients-not-emptied-between-batches",
        "fiddlex/pipeline/continuous.py",
        old="lax.dynamic_update_index_in_dim(total, jnp.zeros_like(g), sums, 0), carry.grads.outer, outer",
        new="lax.dynamic_update_index_in_dim(total, g, sums, 0), carry.grads.outer, outer",
        tests=(LAGGING,),
    ),
    Mutation(
        "batch-under-way-has-the-loss-scale-of-the-one-before",
        ENGINE,
        old="self.scales[self._batch_of(number)]",
        new="self.scales[0]",
        tests=(OVERFLOWING,),
    ),
    Mutation(
        "backward-with-the-input-of-the-forward-beside-it",
        ENGINE,
        old="stash, left = Slot(carry.stash, own.backward_stash)",
        new="stash, left = Slot(carry.stash, own.forward_stash)",
        tests=(GPT,),
    ),
    Mutation(
        "recomputed-with-the-dropout-of-another-microbatch",
        ENGINE,
        old="stage, microbatch = self.model.stage, self._microbatch(own.backward_microbatch)",
        new="stage, microbatch = self.model.stage, self._microbatch(jnp.maximum(own.forward_microbatch, 0))",
        tests=(GPT,),
    ),
    Mutation(
        "padding-rows-run-as-layers",
        ENGINE,
        old="num_layers=jnp.where(number == NONE, 0, jnp.asarray(sizes)[rank, number])",
        new="num_layers=jnp.where(number == NONE, 0, rows)",
        tests=(GPT,),
    ),
    Mutation(
        "idle-slots-run-layers",
        ENGINE,
        old="num_layers=jnp.where(number == NONE, 0, jnp.asarray(sizes)[rank, number])",
        new="num_layers=jnp.asarray(sizes)[rank, number]",
        tests=(GPT,),
    ),
    Mutation(
        "work-on-the-stash-moved-out-of-its-slot",
        STAGE,
        old="number = in_turn(self.number, index)",
        new="number = self.number",
        tests=("tests/xla/test_ahead_of_time.py::test_nothing_of_a_slot_runs_in_ticks_in_which_the_slot_is_idle",),
    ),
    Mutation(
        "work-of-the-head-moved-out-of-its-slot",
        ENGINE,
        old="update(in_turn(microbatch, turn), *kept)",
        new="update(jnp.asarray(microbatch), *kept)",
        tests=("tests/xla/test_ahead_of_time.py::test_nothing_of_a_slot_runs_in_ticks_in_which_the_slot_is_idle",),
    ),
    Mutation(
        "empty-arrays-in-the-state",
        "fiddlex/pipeline/continuous.py",
        old='"pipe", to="varying") if size else None',
        new='"pipe", to="varying")',
        tests=("tests/train/step/test_unflushed.py::test_no_array_of_the_state_is_empty",),
    ),
    Mutation(
        "work-on-the-only-microbatch-moved-out-of-its-slot",
        ENGINE,
        old="if size == x.shape[0]:",
        new="if size > x.shape[0]:",
        tests=("tests/xla/test_ahead_of_time.py::test_nothing_of_a_slot_runs_in_ticks_in_which_the_slot_is_idle",),
    ),
    Mutation(
        "layers-of-a-short-stage-at-the-end-of-its-rows",
        "fiddlex/schedules/placement.py",
        old="rows += [*own, *[PADDING] * (self.rows_per_chunk - len(own))]",
        new="rows += [*[PADDING] * (self.rows_per_chunk - len(own)), *own]",
        tests=("tests/schedules/test_placement.py::test_each_layer_has_a_row_on_the_rank_of_its_stage",),
    ),
    Mutation(
        "weight-gradient-added-twice",
        STAGE,
        old="return _add(grads, chunk.grad_row + index, dweights)",
        new="return _add(_add(grads, chunk.grad_row + index, dweights), chunk.grad_row + index, dweights)",
        tests=(GPT,),
    ),
    Mutation(
        "weight-gradient-left-out",
        STAGE,
        old="return _add(grads, chunk.grad_row + index, dweights)",
        new="return grads",
        tests=(GPT,),
    ),
    Mutation(
        "gradients-of-biases-left-out-of-split-backwards",
        STAGE,
        old="return result.dx, leaves, _add(grads, chunk.grad_row + index, result.dgiven)",
        new="return result.dx, leaves, grads",
        tests=(GPT,),
    ),
    # Schedules and their rules.
    Mutation(
        "1f1b-holds-one-microbatch-more",
        "fiddlex/schedules/generators.py",
        old="[pipe - rank - 1 for rank in range(pipe)]",
        new="[pipe - rank for rank in range(pipe)]",
        tests=("tests/simulate/test_clock.py::test_peaks_are_those_of_the_papers_table",),
    ),
    Mutation(
        "zb-h1-puts-weight-gradients-off-too-long",
        "fiddlex/schedules/zero_bubble.py",
        old="warmup=pipe - rank - 1, delay=rank) for rank",
        new="warmup=pipe - rank - 1, delay=rank + 1) for rank",
        tests=("tests/schedules/test_text.py::test_printed_schedules",),
    ),
    Mutation(
        "block-begins-its-backward-at-once",
        "fiddlex/schedules/repeated_blocks.py",
        old="least = loss_wait if actions[0]",
        new="least = 0 if actions[0]",
        tests=("tests/simulate/test_clock.py::test_v_half_and_v_min_are_no_slower_than_the_tables_of_their_authors",),
    ),
    Mutation(
        "rank-waits-though-a-later-action-could-run",
        "fiddlex/schedules/repeated_blocks.py",
        old="for action in self.left if ready else ():",
        new="for action in ():",
        tests=("tests/simulate/test_clock.py::test_v_half_and_v_min_are_no_slower_than_the_tables_of_their_authors",),
    ),
    Mutation(
        "dual-pipe-v-splits-a-backward-too-many",
        "fiddlex/schedules/dual_pipe_v.py",
        old="""        *[f"{side}B" for side in drain[: rank + 1]],
        *[f"{side}I" for side in drain[rank + 1 :]],
        *["W", "dI"] * below,
        *["W"] * (rank + 1),
""",
        new="""        *[f"{side}B" for side in drain[:rank]],
        *[f"{side}I" for side in drain[rank:]],
        *["W", "dI"] * below,
        *["W"] * (rank + 2),
""",
        tests=("tests/schedules/test_generators.py::test_order_of_dual_pipe_v",),
    ),
    Mutation(
        "dual-pipe-v-runs-ahead-unasked",
        "fiddlex/schedules/dual_pipe_v.py",
        old="reversed(range(pipe))), strict=True)",
        new="reversed(range(pipe))))",
        tests=(
            "tests/simulate/test_lockstep.py::test_no_other_order_of_the_ticks_is_faster_than_that_of_the_name",
            "tests/simulate/test_lockstep.py::test_dual_pipe_v_is_faster_in_its_own_order_and_holds_as_much",
        ),
    ),
    Mutation(
        "overlapped-pair-is-read-backward-first",
        "fiddlex/schedules/text.py",
        old="return [forward, backward]",
        new="return [backward, forward]",
        tests=("tests/schedules/test_text.py::test_a_table_of_torchs_form_is_the_schedule_by_name",),
    ),
    Mutation(
        "weight-gradient-need-not-wait-for-the-input-gradient",
        "fiddlex/schedules/schedule.py",
        old="return (Action(stage, _I, microbatch),)",
        new="return (Action(stage, _F, microbatch),)",
        tests=(f"{RULES}_an_action_ahead_of_what_it_needs_on_its_stage",),
    ),
    Mutation(
        "validator-accepts-a-missing-weight-gradient",
        VALIDATE,
        old="if forward and (fused or (inputs and weights)):",
        new="if forward and (fused or inputs):",
        tests=(f"{RULES}_an_action_that_is_missing",),
    ),
    Mutation(
        "validator-accepts-a-deadlock",
        VALIDATE,
        old="    _check_no_deadlock(schedule)\n    return schedule",
        new="    return schedule",
        tests=(f"{RULES}_a_deadlock_marks_every_head_and_says_what_each_waits_for",),
    ),
    Mutation(
        "stage-placed-where-it-first-stands",
        "fiddlex/schedules/text.py",
        old="homes[stage].most_common(1)[0][0]",
        new="next(iter(homes[stage]))",
        tests=("tests/schedules/test_text.py::test_a_stray_action_does_not_move_its_stage",),
    ),
    Mutation(
        "function-runs-ahead-unasked",
        "fiddlex/schedules/generators.py",
        old="own = schedule.strict or source.is_own",
        new="own = schedule.strict and not source.is_own",
        tests=(
            "tests/schedules/test_functions.py::test_a_function_makes_a_schedule_of_any_sizes_that_keeps_its_order",
        ),
    ),
    Mutation(
        "what-the-ticks-hold-told-without-them",
        "fiddlex/schedules/ticks.py",
        old="_most_held(action for _, action in run), _most_held(row)",
        new="_most_held(row), _most_held(row)",
        tests=("tests/test_own_schedules.py::test_schedule_tells_what_the_ticks_move",),
    ),
    # The codec of the stash.
    Mutation(
        "statistics-encoded",
        RESIDUALS,
        old='equation.params["name"] == STATISTICS',
        new='equation.params["name"] != STATISTICS',
        tests=(f"{ENCODED}_only_activations_are_encoded",),
    ),
    Mutation(
        "input-of-a-layer-encoded",
        RESIDUALS,
        old="return kept | inputs",
        new="return kept - inputs",
        tests=(f"{ENCODED}_only_activations_are_encoded",),
    ),
    Mutation(
        "codec-cuts-off-instead-of-rounding",
        CODEC,
        old="elements = jnp.round(elements)",
        new="elements = jnp.trunc(elements)",
        tests=(f"{ENCODED}_values_are_those_of_numpy",),
    ),
    Mutation(
        "codec-hides-what-is-not-finite",
        CODEC,
        old="scales = jnp.abs(x).max(axis=-1, keepdims=True)",
        new="scales = jnp.nan_to_num(jnp.abs(x)).max(axis=-1, keepdims=True)",
        tests=(f"{ENCODED}_no_value_that_is_not_finite_is_hidden",),
    ),
)
