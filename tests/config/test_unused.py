"""Fields that change nothing are refused or named, and only these."""

import re

import pytest

from fiddlex.config import Config
from fiddlex.config.overrides import override
from fiddlex.config.unused import unused, unused_fields
from fiddlex.errors import ConfigError
from fiddlex.schedules.resolve import resolve

BERT = "model.family=bert"
CLASSES = ("model.objective=classification", "data.source=tsv:a", "data.labels=yes,no")

STASH = (
    "pipeline.stash_memory=host changes nothing with pipeline.schedule=1f1b, pipeline.num_chunks=1, "
    "pipeline.num_microbatches=8 and mesh.pipe={pipe}: copies to the host, which take a slot of the stash themselves, "
    "would save no memory there, so nothing is copied."
)
MASKS = (
    "masks in pipeline.recompute=gelu,masks changes nothing with model.dropout=0: without dropout there are no masks "
    "to recompute."
)
ORDER = (
    "pipeline.order=strict changes nothing with pipeline.schedule=zb_h1: it splits all backward passes into I and W, "
    "and each rank then runs one action per tick in the schedule's order."
)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ([], []),
        (["pipeline.stash_memory=host"], [STASH.format(pipe=1)]),
        (["pipeline.stash_memory=host", "mesh.pipe=2"], [STASH.format(pipe=2)]),
        (["pipeline.stash_memory=host", "mesh.pipe=2", "pipeline.semantics=2bw"], [STASH.format(pipe=2)]),
        (["pipeline.stash_memory=host", "mesh.pipe=4"], []),
        (["pipeline.stash_memory=host", "mesh.pipe=4", "pipeline.semantics=2bw"], []),
        (["pipeline.stash_memory=host", "mesh.pipe=2", "pipeline.schedule=gpipe"], []),
        (["pipeline.order=strict"], []),
        (["pipeline.order=strict", "pipeline.schedule=zb_h1"], [ORDER]),
        (["pipeline.recompute=gelu,masks"], [MASKS]),
        (["pipeline.recompute=gelu,masks", "model.dropout=0.1"], []),
        (["pipeline.recompute=full"], []),
        (["pipeline.stash_memory=host", "pipeline.recompute=gelu,masks"], [STASH.format(pipe=1), MASKS]),
    ],
)
def test_fields_that_change_nothing_are_named(fields: list[str], expected: list[str]) -> None:
    config = override(Config(), "pipeline.num_microbatches=8", *fields).validate()
    spec = resolve(config).spec
    assert unused_fields(config, host_stash_slots=spec.sizes.slots.host_stash, has_whole=spec.has_whole) == expected


@pytest.mark.parametrize(
    ("field", "without", "fields_with"),
    [  # a field, the values of others with which it changes nothing, the remedy, and changes that use the field
        ("optimizer.beta1=0.8", "optimizer.name=adafactor", ["optimizer.name=muon"]),
        ("optimizer.beta2=0.8", "optimizer.name=sgd", ["optimizer.name=lion"]),
        ("optimizer.epsilon=0.1", "optimizer.name=lion", ["optimizer.name=lamb"]),
        ("optimizer.beta3=0.8", "optimizer.name=adamw", ["optimizer.name=adan"]),
        ("optimizer.momentum=0.8", "optimizer.name=adamw", ["optimizer.name=sgd"]),
        ("optimizer.momentum=0.8", "optimizer.name=lion", ["optimizer.name=mine.py:rule"]),
        ("optimizer.decay_steps=9", "optimizer.schedule=constant", ["optimizer.schedule=linear"]),
        ("optimizer.final_learning_rate=0.1", "optimizer.schedule=constant", ["optimizer.schedule=cosine"]),
        ("optimizer.loss_scale=8", "model.dtype=float32", ["model.dtype=float16"]),
        ("optimizer.loss_scale_window=8", "model.dtype=bfloat16", ["model.dtype=float16"]),
        ("model.rope_factor=2", "model.rope_scaling=none", ["model.family=llama", "model.rope_scaling=linear"]),
        ("model.rope_original_len=9", "model.rope_scaling=none", ["model.family=llama", "model.rope_scaling=llama3"]),
        ("data.split=8,1,1", "data.source=text:a", ["data.source=megatron:a"]),
        ("data.split=8,1,1", "data.eval_source=megatron:b", ["data.source=megatron:a", "data.eval_source="]),
        ("data.eval_fraction=0.2", "data.eval_source=text:b", ["data.eval_source="]),
        ("data.eval_fraction=0.2", "data.source=megatron:a", ["data.source=stdlib"]),
        ("data.text_column=a", 'data.source=text:a and data.eval_source=""', ["data.source=hf:a"]),
        ("data.text_column=a", 'data.source=tokens:a and data.eval_source=""', ["data.eval_source=array_record:a"]),
        ("data.token_dtype=uint32", 'data.source=text:a and data.eval_source=""', ["data.eval_source=tokens:b"]),
        ("data.sample_cache_folder=a", "data.sample_cache_gib=0.0", ["data.sample_cache_gib=1"]),
        ("data.cache=a", 'data.source=tokens:a and data.eval_source=""', ["data.eval_source=text:b"]),
        ("data.cache=a", 'data.source=megatron:a and data.eval_source=""', ["data.source=stdlib"]),
        ("data.cache=a", "model.objective=classification", ["model.objective=mlm"]),
        ("data.whole_words=true", "model.objective=lm", [BERT]),
        ("data.mask_fraction=0.2", "model.objective=lm", [BERT, "model.objective=mlm_sop"]),
        ("data.pack=false", "model.objective=lm", [BERT]),
        ("data.labels=a,b", "model.objective=lm", [BERT, "model.objective=classification", "data.source=tsv:a"]),
        ("data.truncate=true", "model.objective=lm", [BERT, *CLASSES]),
        ("data.skip_bad_lines=true", 'model.objective=lm and data.eval_source=""', ["data.eval_source=jsonl:a"]),
        ("data.num_choices=3", "model.objective=lm", [BERT, "model.objective=multiple_choice", "data.source=jsonl:a"]),
        ("mesh.sequence_parallel=true", "mesh.tensor=1", ["mesh.tensor=2"]),
        ("mesh.collective_matmul=true", "mesh.tensor=1", ["mesh.tensor=2"]),
        ("mesh.outermost=pipe", "mesh.pipe=1", ["mesh.data=2", "mesh.pipe=2"]),
        ("pipeline.switch_window=9", 'pipeline.semantics_schedule=""', ["pipeline.semantics_schedule=auto"]),
        ("pipeline.prediction_order=2", "pipeline.prediction=none", ["pipeline.prediction=extrapolate"]),
        ("pipeline.prediction_scale=1.5", "pipeline.prediction=none", ["pipeline.prediction=momentum"]),
        ("train.mean_time_to_failure_h=24", "train.checkpoint_every=500", ["train.checkpoint_every=auto"]),
        ("train.checkpoint_overhead=0.1", "train.checkpoint_every=0", ["train.checkpoint_every=auto"]),
        ("train.keep_every=9", "train.checkpoint_every=0", ["train.checkpoint_every=3"]),
        ("train.keep_last=9", "train.checkpoint_every=0", ["train.checkpoint_every=auto"]),
        ("train.on_spike=stop", "train.spike_bound=0.0", ["train.spike_bound=4"]),
        ("train.max_faults=2", "train.on_nonfinite=stop and train.spike_bound=0.0", ["train.on_nonfinite=skip"]),
        ("train.max_faults=2", "train.on_nonfinite=stop and train.spike_bound=0.0", ["train.spike_bound=4"]),
        ("train.profile_ranks=all", 'train.profile_steps=""', ["train.profile_steps=3:4"]),
    ],
)
def test_fields_that_other_fields_make_the_run_ignore_are_refused(
    field: str, without: str, fields_with: list[str]
) -> None:
    """A refusal names what makes the run ignore the field; the workdir of an earlier version is read without it."""
    ignoring = [each for each in without.split(" and ") if not each.endswith(('=""', "=mlm", "=lm"))]
    config = override(Config(), *ignoring, field)
    path = field.partition("=")[0]
    messages = {each.path: each.message for each in unused(config)}
    assert re.match(rf"{path}=[^ ]* with {re.escape(without)}: it changes nothing. Set ", messages[path])
    plain = config.without_unused()
    assert plain == override(Config(), *ignoring).without_unused()
    assert not list(unused(plain))
    assert path not in [each.path for each in unused(override(Config(), *ignoring, *fields_with, field))]


def test_what_an_override_makes_a_run_ignore_is_reset_unless_it_was_given_too() -> None:
    of_file = override(Config(), "optimizer.final_learning_rate=0.1", "data.pack=false")
    changed = override(of_file, "optimizer.schedule=constant")
    assert changed.optimizer.final_learning_rate == 0
    assert not changed.data.pack  # nothing that was given has to do with it
    with pytest.raises(ConfigError, match=r"data\.pack=False with model.objective=lm: it changes nothing"):
        changed.validate()
    given = override(of_file, "optimizer.schedule=constant", "optimizer.final_learning_rate=0.2")
    assert given.optimizer.final_learning_rate == 0.2
    family = override(override(Config(), BERT, "data.pack=false"), "model.family=gpt")
    assert family.data.pack


def test_the_message_names_each_remedy() -> None:
    config = override(Config(), "train.checkpoint_every=auto", "train.mean_time_to_failure_h=24", "train.max_faults=3")
    with pytest.raises(ConfigError) as error:
        config.validate()
    assert str(error.value) == (
        "train.max_faults=3 with train.on_nonfinite=stop and train.spike_bound=0.0: it changes nothing. Set "
        "train.on_nonfinite to skip or rollback, or train.spike_bound to 4, for example, or train.max_faults to 10."
    )
    with pytest.raises(ConfigError) as error:
        override(config, "train.checkpoint_overhead=0.1", "train.on_nonfinite=skip").validate()
    assert str(error.value) == (
        "train.checkpoint_overhead=0.1 with train.mean_time_to_failure_h=24.0: it changes nothing. Set "
        "train.mean_time_to_failure_h to 0, or train.checkpoint_overhead to 0.035."
    )
