"""Mutations of what takes code of the user's: families, semantics and update rules."""

from tests.mutations.mutation import Mutation

FAMILY = "tests/models/test_new_family.py::test_what_its_layers_do_not_say_that_they_do_is_refused_and_not_planned"
TEST_REGISTERED = "tests/train/run/test_registered.py"
TEST_RULES = "tests/train/test_own_rules.py"
LAYOUTS = "tests/train/test_layouts.py::test_layout_trains_as_the_reference_does"
MISTAKES = f"{TEST_RULES}::test_mistakes_in_a_rule_are_told"

MUTATIONS = (
    Mutation(
        "layers-that-take-whole-sequences-get-parts",
        "fiddlex/config/config.py",
        old="if value and not getattr(family(name), fact):",
        new="if value > 1 and not getattr(family(name), fact):",
        tests=(FAMILY,),
    ),
    Mutation(
        "plans-cut-sequences-of-layers-that-take-whole-ones",
        "fiddlex/planner/layouts.py",
        old=" and family(model.family).sequence_parallel",
        new="",
        tests=(FAMILY,),
    ),
    Mutation(
        "own-delays-from-the-last-stage",
        "fiddlex/schedules/semantics.py",
        old="        return tuple(delays)\n",
        new="        return tuple(reversed(delays))\n",
        tests=(f"{TEST_RULES}::test_a_run_trains_as_the_plain_loop_of_the_page_does[halves-delays0-False]",),
    ),
    Mutation(
        "own-rules-are-not-tried-on-stacked-weights",
        "fiddlex/train/step/own_rule.py",
        old="_updates(rule, _stacked(weights, axis=0), _stacked(grads, axis=1))[0]",
        new="_stacked(_updates(rule, weights, grads)[0], axis=0)",
        tests=(MISTAKES,),
    ),
    Mutation(
        "own-rules-are-not-tried-one-weight-at-a-time",
        "fiddlex/train/step/own_rule.py",
        old="    if alone:\n",
        new="    if not alone:\n",
        tests=(f"{TEST_RULES}::test_a_rule_of_whole_weights_is_refused_where_weights_come_one_by_one",),
    ),
    Mutation(
        "what-an-own-rule-keeps-is-not-checked",
        "fiddlex/train/step/own_rule.py",
        old="    if found != says.moments:\n",
        new="    if found > says.moments + 1:\n",
        tests=(MISTAKES,),
    ),
    Mutation(
        "halves-of-weights-are-not-tried",
        "fiddlex/train/step/own_rule.py",
        old="HALVES = (lambda x: x[..., : x.shape[-1] // 2], lambda x: x[..., x.shape[-1] // 2 :])",
        new="HALVES = (lambda x: x, lambda x: x[..., :0])",
        tests=(MISTAKES,),
    ),
    Mutation(
        "whole-weights-in-the-order-of-rows",
        "fiddlex/train/step/whole_weights.py",
        old="each[layer] for layer in",
        new="each[0] for layer in",
        tests=(f"{LAYOUTS}[2x2x1-gpt-1f1b-v1-m4-31-none-own:lamb-zero1-2bw]",),
    ),
    Mutation(
        "a-workdir-names-the-rate-that-is-run",
        "fiddlex/train/run/changed_rate.py",
        old="        before.schedule = now.schedule  # the user's own; what a workdir names is never run\n",
        new="",
        tests=(f"{TEST_RULES}::test_a_rate_of_ones_own_is_that_of_each_update",),
    ),
    Mutation(
        "an-own-rule-keeps-what-adam-keeps",
        "fiddlex/costs/weight_memory.py",
        old="        return rule_function(optimizer).moments\n",
        new="        return 2\n",
        tests=(f"{TEST_RULES}::test_decay_rate_and_clipping_are_those_of_other_rules",),
    ),
    Mutation(
        "a-workdir-names-the-rule-that-is-run",
        "fiddlex/train/run/transfer/result.py",
        old="    config.optimizer = OptimizerConfig(zero1=config.optimizer.zero1)\n",
        new="",
        tests=(f"{TEST_RULES}::test_a_run_goes_on_where_its_file_was_moved_and_is_evaluated_without_it",),
    ),
    Mutation(
        "a-file-that-registers-a-schedule-alone-refused",
        "fiddlex/config/user_code/registries.py",
        old="return {(field, name): each[name] for field, each in REGISTRIES.items() for name in each.origins}",
        new="return {(name, name): value for name, value in REGISTRIES['model.family'].items()}",
        tests=("tests/test_own_schedules.py::test_what_a_config_file_registers_is_found_again",),
    ),
    Mutation(
        "a-config-file-that-nobody-has-trained-with-is-run",
        "fiddlex/train/run/registered.py",
        old="    if not _is_noted(origin):",
        new="    if False:",
        tests=(f"{TEST_REGISTERED}::test_a_file_that_is_not_the_runs_own_is_not_run_until_it_is_named",),
    ),
    Mutation(
        "a-config-file-that-has-changed-is-run",
        "fiddlex/train/run/registered.py",
        old="    if digest != origin.digest:",
        new="    if False:",
        tests=(f"{TEST_REGISTERED}::test_a_file_that_is_not_the_runs_own_is_not_run_until_it_is_named",),
    ),
    Mutation(
        "a-workdir-names-any-module",
        "fiddlex/train/run/registered.py",
        old="    if top not in importlib.metadata.packages_distributions():",
        new="    if False:",
        tests=(f"{TEST_REGISTERED}::test_what_somebody_else_writes_into_a_record_is_not_run",),
    ),
    Mutation(
        "a-workdir-replaces-what-is-registered",
        "fiddlex/config/user_code/registries.py",
        old="            registry.data.update(entries)\n",
        new="",
        tests=(f"{TEST_REGISTERED}::test_two_files_that_register_one_name",),
    ),
    Mutation(
        "an-exchange-for-a-product-that-is-not-divided",
        "fiddlex/costs/work.py",
        old="        if first.split\n",
        new="",
        tests=("tests/costs/test_work.py::test_a_product_that_tensor_ranks_do_not_divide_has_no_exchange",),
    ),
    Mutation(
        "a-family-of-fiddlex-replaced",
        "fiddlex/config/families.py",
        old="if name in FAMILIES.built_in and name in FAMILIES.origins:",
        new="if False:",
        tests=("tests/models/test_checks.py::test_a_family_of_fiddlex_is_not_replaced",),
    ),
    Mutation(
        "a-schedule-of-fiddlex-replaced",
        "fiddlex/schedules/generators.py",
        old="if name in GENERATORS.built_in and name in GENERATORS.origins:",
        new="if False:",
        tests=("tests/schedules/test_generators.py::test_a_schedule_of_fiddlex_is_not_replaced",),
    ),
)
