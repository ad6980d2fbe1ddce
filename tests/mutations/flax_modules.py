"""Mutations of fiddlex's families as Flax modules, and of what takes their weights from and to files."""

from tests.mutations.mutation import Mutation

MODELS, TREES = "tests/flax/test_models.py", "tests/train/run/transfer/test_trees.py"

MUTATIONS = (
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
