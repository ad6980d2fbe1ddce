"""Mutations of what predicts: `fiddlex.planner`, `fiddlex.simulate`, and the facts that they reckon with."""

from tests.mutations.mutation import Mutation

MEMORY = "fiddlex/costs/memory.py"
ARGUMENTS = "tests/costs/test_device_memory.py::test_arguments_of_the_step_are_counted_exactly"
FLOPS = "tests/costs/test_sizes.py::test_flops_are_those_of_the_matrix_products"

MUTATIONS = (
    # Memory.
    Mutation(
        "memory-without-gradients",
        MEMORY,
        old="self.weights + self.optimizer + self.versions + self.gradients + self.inputs",
        new="self.weights + self.optimizer + self.versions + self.inputs",
        tests=(
            "tests/costs/test_device_memory.py::"
            "test_gradients_and_their_reduction_are_most_of_a_wide_model_on_short_sequences",
        ),
    ),
    Mutation(
        "memory-with-one-stash-slot-too-few",
        MEMORY,
        old="stash=slots.stash * rows * layer.stash()",
        new="stash=(slots.stash - 1) * rows * layer.stash()",
        tests=(f"{ARGUMENTS}[2bw]",),
    ),
    Mutation(
        "memory-of-the-weights-in-use-alone",
        MEMORY,
        old="versions=(sizes.versions - 1) * compute",
        new="versions=(sizes.versions - 2) * compute",
        tests=(f"{ARGUMENTS}[2bw]",),
    ),
    Mutation(
        "moments-whole-on-every-replica",
        "fiddlex/costs/weight_memory.py",
        old="shape[dimension] //= data",
        new="shape[dimension] //= 1",
        tests=(f"{ARGUMENTS}[adamw]",),
    ),
    # Clocks.
    Mutation(
        "hops-take-no-time-free-running",
        "fiddlex/simulate/clock.py",
        old="hops[actions[need].stage] if need",
        new="0.0 if need",
        tests=("tests/simulate/test_clock.py::test_a_hop_is_paid_between_ranks_only_and_by_the_stage_that_sends",),
    ),
    Mutation(
        "hops-take-no-time-in-lockstep",
        "fiddlex/simulate/lockstep.py",
        old="ends[_FORWARD][ticks, senders] + hops[stages]",
        new="ends[_FORWARD][ticks, senders]",
        tests=("tests/simulate/test_lockstep.py::test_times_by_hand",),
    ),
    Mutation(
        "pipeline-that-goes-on-timed-from-its-start",
        "fiddlex/simulate/steady.py",
        old="period = (ends[sum(ticks)] - ends[sum(ticks[:before])]) / length",
        new="period = ends[sum(ticks)] / (before + length)",
        tests=("tests/planner/test_closed_forms.py::test_a_pipeline_that_is_not_flushed_takes_as_long_as_unrolled",),
    ),
    # The planner.
    Mutation(
        "bound-above-the-simulated-time",
        "fiddlex/planner/search.py",
        old="least = m * (cut.most * times.layer + times.edges)",
        new="least = m * (cut.most * times.layer + 1.2 * times.edges)",
        tests=("tests/planner/test_search.py::test_no_layout_takes_less_than_its_bound",),
    ),
    Mutation(
        "search-ends-a-layout-early",
        "fiddlex/planner/search.py",
        old="if len(best) == keep and entry.least > best[-1][0]:",
        new="if len(best) == keep:",
        tests=("tests/planner/test_search.py::test_it_finds_what_looking_at_every_layout_finds",),
    ),
    Mutation(
        "recomputed-layers-reduced-once",
        "fiddlex/planner/cost_model.py",
        old="backward_input + once.backward_input + once.forward * repeats",
        new="backward_input + once.backward_input",
        tests=(
            "tests/planner/test_cost_model.py::"
            "test_a_layer_has_two_reductions_over_tensor_each_way_and_two_more_when_it_is_recomputed",
        ),
    ),
    Mutation(
        "products-in-rings-that-save-the-whole-input",
        "fiddlex/costs/layer_memory.py",
        old="parts=tensor if config.mesh.collective_matmul else 1",
        new="parts=1",
        tests=(f"{ARGUMENTS}[2bw, products in rings]",),
    ),
    Mutation(
        "products-in-rings-counted-whole",
        "fiddlex/costs/work.py",
        old="pieces=tensor * ring_ways(config) if config.mesh.collective_matmul else 1",
        new="pieces=1",
        tests=("tests/costs/test_ring_work.py::test_products_and_hops_of_a_layer_are_those_of_the_program",),
    ),
    Mutation(
        "kernel-gradients-in-pieces",
        "fiddlex/costs/work.py",
        old="weights = tuple(product.gradients[1] for product in sizes.products())",
        new="weights = tuple(product.gradients[1] for product in around)",
        tests=("tests/costs/test_ring_work.py::test_products_and_hops_of_a_layer_are_those_of_the_program",),
    ),
    Mutation(
        "two-ranks-taken-to-send-two-ways",
        "fiddlex/cluster/rings.py",
        old="return 2 if halves and ranks > 2 else 1",
        new="return 2 if halves else 1",
        tests=("tests/cluster/test_rings.py::test_halves_travel_both_ways_where_their_products_stay_large",),
    ),
    Mutation(
        "two-rings-on-the-same-links-counted-as-one",
        "fiddlex/planner/layer_exchange.py",
        old="else max(0.0, 2 * hop - back) - one",
        new="else max(0.0, hop - back) - one",
        tests=("tests/planner/test_layer_exchange.py::test_rings_take_as_long_as_played",),
    ),
    Mutation(
        "weight-passes-predicted-as-parts-of-whole-backward-passes",
        "fiddlex/planner/predict.py",
        old="splits = pipeline.sizes.slots.weight_stash > 0",
        new="splits = False",
        tests=(
            "tests/planner/test_search.py::"
            "test_rings_of_weight_passes_hide_nothing_where_a_schedule_splits_backward_passes",
        ),
    ),
    Mutation(
        "input-gathered-again-for-nothing",
        "fiddlex/planner/cost_model.py",
        old='("tensor", in_layers + again, ring_shares',
        new='("tensor", in_layers, ring_shares',
        tests=("tests/costs/test_ring_work.py::test_products_and_hops_of_a_layer_are_those_of_the_program",),
    ),
    Mutation(
        "rings-faster-than-their-slowest-link",
        "fiddlex/planner/communication.py",
        old="return max((share.seconds / hops for share",
        new="return min((share.seconds / hops for share",
        tests=("tests/planner/test_communication.py::test_a_hop_waits_for_the_slowest_link_that_the_ring_crosses",),
    ),
    Mutation(
        "rings-and-no-rings-share-their-memory",
        "fiddlex/planner/search.py",
        old='self._memory_once(layout._replace(outermost="data"))',
        new='self._memory_once(layout._replace(outermost="data", collective_matmul=False))',
        tests=("tests/planner/test_search.py::test_a_plan_with_rings_says_so_and_counts_what_they_hide",),
    ),
    Mutation(
        "rings-offered-on-gpus",
        "fiddlex/planner/layouts.py",
        old="if sequence_parallel and on_tpus else",
        new="if sequence_parallel else",
        tests=("tests/planner/test_search.py::test_rings_are_searched_on_tpus_with_sequence_parallelism",),
    ),
    Mutation(
        "times-without-rings-taken-for-those-with-rings",
        "fiddlex/planner/profile.py",
        old="if _in_rings(entry.mesh) == _in_rings(mesh)]",
        new="]",
        tests=("tests/planner/test_profile.py::test_an_entry_without_rings_predicts_no_rings",),
    ),
    Mutation(
        "ring-of-as-many-steps-as-devices",
        "fiddlex/planner/communication.py",
        old="steps = size - 1",
        new="steps = size",
        tests=("tests/planner/test_communication.py::test_a_gigabyte_on_sixteen_a100",),
    ),
    Mutation(
        "short-pipelines-drawn-out",
        "fiddlex/schedules/traits.py",
        old="onset: Callable[[int], int] = lambda p: 2 * p",
        new="onset: Callable[[int], int] = lambda p: p",
        tests=("tests/planner/test_closed_forms.py::test_a_batch_takes_as_long_as_simulated_whole",),
    ),
    Mutation(
        "schedules-without-traits-drawn-out",
        "fiddlex/schedules/traits.py",
        old="return _TRAITS.get(generator) if generator else None",
        new="return _TRAITS.get(generator, Traits(None)) if generator else None",
        tests=("tests/planner/test_predict.py::test_a_generator_without_traits_is_simulated_whole",),
    ),
    Mutation(
        "phases-predicted-as-if-they-were-of-one-length",
        "fiddlex/simulate/steady.py",
        old="(phase.end - phase.start) * periods[phase.semantics]",
        new="steps / len(pipeline.phases) * periods[phase.semantics]",
        tests=("tests/planner/test_predict.py::test_phases_take_the_mean_over_steps_and_the_memory_of_the_largest",),
    ),
    Mutation(
        "flash-attention-in-spite-of-dropout",
        "fiddlex/cluster/flash.py",
        old="if not reason and dropout:",
        new="if False:",
        tests=("tests/models/test_flash.py",),
    ),
    Mutation(
        "replicas-share-weights-once-too-often",
        "fiddlex/planner/partition.py",
        old="shared = 2 * (replicas - 1) * weights",
        new="shared = 2 * replicas * weights",
        tests=("tests/planner/test_partition.py::test_pipedreams_partition_is_the_best_of_all",),
    ),
    Mutation(
        "weight-gradients-without-their-products",
        "fiddlex/costs/work.py",
        old="Work(weights, sizes.accumulated())",
        new="Work((), sizes.accumulated())",
        tests=("tests/costs/test_work.py::test_products_of_all_devices_are_the_models_operations",),
    ),
    Mutation(
        "profile-without-what-replicas-lose",
        "fiddlex/planner/fit.py",
        old="return slower, max(once - update - parts.fixed, 0.0) / weights",
        new="return 1.0, max(once - update - parts.fixed, 0.0) / weights",
        tests=("tests/planner/test_profile.py::test_a_machine_is_found_again_from_its_steps",),
    ),
    # The mesh and the slow link.
    Mutation(
        "distance-along-an-axis-counts-the-axis-itself",
        "fiddlex/config/sections.py",
        old="in order[order.index(axis) + 1 :]",
        new="in order[order.index(axis) :]",
        tests=("tests/cluster/test_mesh.py::test_numbers_run_over_tensor_fastest_and_over_the_outermost_axis_slowest",),
    ),
    Mutation(
        "ranks-of-a-host-left-apart",
        "fiddlex/cluster/mesh.py",
        old='np.argsort(numbers, kind="stable")',
        new="range(len(devices))",
        tests=("tests/cluster/test_mesh.py::test_hosts_are_blocks_whatever_the_order_of_the_ranks",),
    ),
    Mutation(
        "one-placement-searched",
        "fiddlex/planner/layouts.py",
        old="return OUTERMOST_AXES[:1] if one_link or data == 1 or pipe == 1 else OUTERMOST_AXES",
        new="return OUTERMOST_AXES[:1]",
        tests=("tests/planner/test_search.py::test_both_placements_are_searched_where_they_differ",),
    ),
    Mutation(
        "sums-over-the-pipe-sent-one-way",
        "fiddlex/planner/cost_model.py",
        old='("pipe", links.pipe, part, 8 * m)',
        new='("pipe", links.pipe, part, 4 * m)',
        tests=("tests/planner/test_cost_model.py::test_traffic_takes_the_seconds_of_the_step",),
    ),
    Mutation(
        "hosts-send-whole-arrays",
        "fiddlex/xla/device_groups.py",
        old="part = size * across / len(group) if reduced_inside else size",
        new="part = size",
        tests=("tests/xla/test_compiled_collectives.py::test_what_a_device_sends_to_other_hosts",),
    ),
    Mutation(
        "devices-of-a-slice-taken-for-the-first-of-the-mesh",
        "fiddlex/xla/device_groups.py",
        old="if self.granules[place] == min(self.granules)]",
        new="][:num_partitions]",
        tests=("tests/xla/test_compiled_collectives.py::test_devices_of_a_slices_program_are_those_of_its_slice",),
    ),
    # Facts.
    Mutation(
        "bandwidth-in-gigabits",
        "fiddlex/cluster/topologies/a100_80.toml",
        old="bandwidth = 25e9",
        new="bandwidth = 200e9",
        tests=("tests/cluster/test_topology.py::test_a100_is_that_of_selene",),
    ),
    Mutation(
        "rings-that-count-inner-devices-again",
        "fiddlex/cluster/topology.py",
        old="rings.append(Ring(inside // joined, link))",
        new="rings.append(Ring(inside, link))",
        tests=("tests/cluster/test_topology.py::test_rings",),
    ),
    Mutation(
        "a-product-that-is-not-described",
        "fiddlex/models/descriptions.py",
        old='Activation(units), Product(units, hidden, "inputs"), Residual()',
        new="Activation(units), Residual()",
        tests=(FLOPS,),
    ),
    Mutation(
        "an-activation-said-to-keep-nothing",
        "fiddlex/costs/layer_memory.py",
        old="return operation.num_inputs * self._local(operation.units) * self.itemsize",
        new="return 0",
        tests=("tests/costs/test_device_memory.py",),
    ),
    Mutation(
        "flops-of-attention-counted-half",
        "fiddlex/costs/sizes.py",
        old="attention = 2 * config.model.seq_len * network.attention.width",
        new="attention = config.model.seq_len * network.attention.width",
        tests=(FLOPS,),
    ),
    Mutation(
        "flops-of-the-head-left-out",
        "fiddlex/costs/sizes.py",
        old='number = {"scored": task.num_scored, "first": task.num_sequences}',
        new='number = {"scored": 0, "first": task.num_sequences}',
        tests=(FLOPS,),
    ),
    Mutation(
        "loop-of-a-compiled-program-runs-once-less",
        "fiddlex/xla/program_text.py",
        old="return int(bound.attributes) if",
        new="return int(bound.attributes) - 1 if",
        tests=("tests/xla/test_program_text.py::test_trips_of_a_loop",),
    ),
)
