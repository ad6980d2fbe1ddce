"""Every layout trains as one device does: losses, gradient norms and weights against a plain reference."""

import copy
import dataclasses
import itertools
import pathlib
from collections.abc import Sequence
from typing import Any

import pytest

from fiddlex.config import Config
from fiddlex.hardware import pieces
from fiddlex.models import collective_matmul, dropout
from fiddlex.models.flash import make_splash
from fiddlex.schedules.resolve import resolve
from fiddlex.train.step import gradients
from tests.programs import ROOT, call
from tests.train import one_layout
from tests.train.further_layouts import (
    FURTHER,
    FURTHER_FOUND,
    FURTHER_LLAMA,
    FURTHER_OFFLOADED,
    FURTHER_PAIRED,
    FURTHER_PREDICTED,
    FURTHER_PUBLISHED,
    FURTHER_RECOMPUTED,
    FURTHER_SPILLED,
    FURTHER_STREAMED,
    PAIRWISE,
)
from tests.train.layouts import (
    BALANCED,
    COVERING,
    FOUND,
    FURTHER_OWN_RULES,
    LLAMA,
    MUON,
    OFFLOADED,
    OWN_RULES,
    PAIRED,
    PUBLISHED,
    RECOMPUTED,
    SPILLED,
    STREAMED,
    Case,
    case,
    check_layout,
)

# Those of the full tier alone.
EVEN_FURTHER = [*PAIRWISE, *FURTHER, *FURTHER_PREDICTED, *FURTHER_LLAMA, *FURTHER_RECOMPUTED, *FURTHER_OFFLOADED]
EVEN_FURTHER += [
    *FURTHER_STREAMED,
    *FURTHER_PUBLISHED,
    *FURTHER_PAIRED,
    *BALANCED[1:],
    *FURTHER_FOUND,
    *FURTHER_OWN_RULES,
]
# Pairs of levels that no case has. Two stages on each of three ranks take six layers, and the cases have four or five;
# `odd` is a table for three ranks, two chunks and four microbatches, whose four stages have a layer each. Without
# dropout the choices of an example score nearly alike, and gradients of the last norm's bias cancel but for rounding.
NOT_COVERED = {
    (("model", "multiple_choice,post"), ("dropout", "-")),
    *((("schedule", schedule), ("pipe", pipe)) for schedule in ("interleaved_1f1b", "zb_v") for pipe in (3, 4)),
    *((("schedule", "odd"), ("pipe", pipe)) for pipe in (1, 2, 4)),
    (("schedule", "odd"), ("microbatches", "at most the ranks")),
    (("schedule", "odd"), ("stages", "uneven")),
}


def levels(layout: Case) -> dict[str, object]:
    """What pairs are made of; the tier of all layouts has more values of some."""
    data, pipe, tensor = map(int, layout.mesh.split("x"))
    num_stages = 4 if layout.schedule == "odd" else pipe * int(layout.v)
    uneven = len(set(layout.layers.split(","))) > 1 if layout.layers != "-" else layout.num_layers % num_stages
    return {
        "model": layout.model,
        "data": min(data, 2),
        "tensor": layout.sp if layout.sp != "-" else min(tensor, 2),
        "pipe": pipe,
        "schedule": layout.schedule,
        "microbatches": "at most the ranks" if int(layout.m) <= pipe else "more",
        "stages": "uneven" if uneven else "even",
        "recompute": layout.recompute,
        "optimizer": layout.optimizer,
        "zero1": layout.zero1,
        "dropout": layout.dropout,
        "semantics": layout.semantics,
    }


# Factors of which the default tier has every pair of levels; `flush` and `piped` are whether there is one.
COUPLED = [
    ("schedule", "flush"),
    ("model", "flush"),
    ("model", "tensor"),
    ("model", "recompute"),
    ("optimizer", "zero1"),
    ("semantics", "piped"),
    ("tensor", "piped"),
    ("data", "piped"),
    ("dropout", "recompute"),
    ("dropout", "tensor"),
]


def test_the_default_tier_covers_every_level_and_the_pairs_that_share_code() -> None:
    everywhere, default = (
        [
            found | {"flush": found["semantics"] == "sync", "piped": layout.mesh[2] != "1"}
            for layout in layouts
            for found in [levels(layout)]
        ]
        for layouts in ([*COVERING, *PAIRWISE], COVERING)
    )
    for factors in [*COUPLED, *((factor,) for factor in everywhere[0])]:
        wanted, covered = ({tuple(found[f] for f in factors) for found in each} for each in (everywhere, default))
        assert wanted == covered, factors
    predictions = {"-", "extrapolate,1", "extrapolate,2", "momentum,1", "momentum,2"}
    assert {layout.prediction.rpartition(",")[0] or "-" for layout in COVERING} == predictions


def test_the_full_tier_covers_every_pair_of_levels() -> None:
    found = [levels(layout) for layout in [*COVERING, *PAIRWISE]]
    values = {factor: {each[factor] for each in found} for factor in found[0]}
    # All that further cases use, but for the norms of a model, and tables made for one test.
    for layout in FURTHER:
        for factor, level in levels(layout).items():
            assert level in values[factor] or factor == "model" or level == "mixed", (factor, level)
    missing = set()
    for one, other in itertools.combinations(values, 2):
        for pair in itertools.product(values[one], values[other]):
            if not any((each[one], each[other]) == pair for each in found):
                missing.add(frozenset({(one, pair[0]), (other, pair[1])}))
    assert missing == set(map(frozenset, NOT_COVERED))


def grouped(layouts: Sequence[Case]) -> list[Any]:
    """As parameters: those of a model go to one worker, where they share the compiled reference."""
    return [pytest.param(layout, marks=pytest.mark.xdist_group(layout.model), id=str(layout)) for layout in layouts]


def check(layout: Case, config: Config) -> None:
    if layout.schedule == "odd" and not layout.mesh.endswith("x1"):
        # XLA has a thread for each device, and each hop of the table and sum over tensor may wait on one.
        row, threads = " ".join(dataclasses.astuple(layout)), {"PJRT_NPROC": "32"}
        call(pathlib.Path(one_layout.__file__), config.to_json(), row, environment=threads)
    else:
        check_layout(layout, config)


DEFAULT = [
    *COVERING,
    MUON,
    *LLAMA,
    *PUBLISHED,
    *PAIRED,
    *BALANCED[:1],
    *FOUND,
    *RECOMPUTED,
    *OFFLOADED,
    *STREAMED,
    *OWN_RULES,
]


def test_the_page_of_features_counts_the_layouts():
    families = [
        {"gpt": "GPT", "llama": "Llama"}.get(each.model.split(",")[0], "BERT") for each in DEFAULT + EVEN_FURTHER
    ]
    gpt, bert, llama = (families.count(name) for name in ("GPT", "BERT", "Llama"))
    page = " ".join((ROOT / "docs" / "features.md").read_text(encoding="utf-8").split())
    assert f"Tests train {gpt} layouts of GPT, {bert} of BERT and {llama} of Llama" in page
    assert f"{len(DEFAULT)} of them are in the default tier" in page


@pytest.mark.parametrize("layout", grouped(DEFAULT))
def test_layout_trains_as_the_reference_does(layout: Case, tiny_config: Config) -> None:
    check(layout, tiny_config)


@pytest.mark.long
@pytest.mark.parametrize("layout", grouped(EVEN_FURTHER))
def test_further_layout_trains_as_the_reference_does(layout: Case, tiny_config: Config) -> None:
    check(layout, tiny_config)


@pytest.mark.parametrize(
    "layout",
    [*grouped(SPILLED), *(pytest.param(each, marks=pytest.mark.long, id=str(each)) for each in FURTHER_SPILLED)],
)
def test_a_stash_on_the_host_trains_alike(layout: Case, tiny_config: Config) -> None:
    tiny_config.pipeline.stash_memory = "host"
    assert resolve(layout.apply(copy.deepcopy(tiny_config)).validate()).spec.sizes.slots.host_stash > 0
    check(layout, tiny_config)


def test_masks_drawn_in_parts_train_alike(tiny_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropout, "MOST_AT_ONCE", 1000)
    check_layout(case("1x2x2 gpt zb_h1 1 4 - - selective sgd zero1 dropout sync"), tiny_config)


def test_a_pipe_that_is_outermost_trains_alike(tiny_config: Config) -> None:
    tiny_config.mesh.outermost = "pipe"
    check_layout(case("2x2x2 gpt zb_h1 1 4 - sp none sgd zero1 dropout 2bw"), tiny_config)


def test_what_lasts_in_row_major_order_trains_alike(tiny_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs."""
    monkeypatch.setitem(gradients.TILES, "cpu", gradients.TILES["gpu"])
    check_layout(case("2x2x2 gpt zb_h1 1 4 - sp gelu,norms,masks sgd zero1 dropout 2bw"), tiny_config)


@pytest.mark.parametrize(
    ("layout", "in_blocks"),
    [
        (case("1x2x4 gpt zb_h1 1 4 - sp none sgd zero1 dropout 2bw"), False),
        (case("1x2x4 gpt zb_h1 1 4 - sp none sgd zero1 dropout 2bw"), True),
        (case("2x1x4 llama 1f1b 1 2 - sp selective adamw zero1 - sync"), False),
        (case("2x2x2 mlm_nsp,post interleaved_1f1b 2 4 - sp full sgd zero1 dropout sync"), False),
        (case("2x2x2 llama 1f1b 1 4 - sp full sgd zero1 - sync"), True),
        *(
            pytest.param(layout, in_blocks, marks=pytest.mark.long)
            for layout in [*COVERING, *LLAMA, *RECOMPUTED, *EVEN_FURTHER]
            for in_blocks in (False, True)
            if layout.sp != "-"
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, Case) else "blocks" if value else "rings",
)
def test_products_in_pieces_train_alike(
    layout: Case, in_blocks: bool, tiny_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "LEAST_ROWS", 1)
    monkeypatch.setattr(collective_matmul, "runs_in_blocks", lambda platform: in_blocks)
    tiny_config.mesh.collective_matmul = True
    check(layout, tiny_config)


@pytest.mark.parametrize("seq_len", [128, 256])  # for 256 positions CPUs have a kernel of their own
@pytest.mark.parametrize(
    "row",
    [
        "1x2x2 gpt 1f1b 1 4 - sp none sgd zero1 - sync",
        pytest.param("1x2x1 gpt zb_h1 1 4 - - none sgd zero1 - 2bw", marks=pytest.mark.long),
        pytest.param("1x1x2 mlm,pre 1f1b 1 2 - - selective sgd zero1 - sync", marks=pytest.mark.long),
        pytest.param("1x2x4 llama,tied 1f1b 1 2 - - full sgd zero1 - sync", marks=pytest.mark.long),
    ],
)
def test_attention_in_a_kernel_trains_alike(
    row: str, seq_len: int, tiny_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_config.model.seq_len = seq_len
    if seq_len == 128:
        monkeypatch.setattr(gradients, "make_kernel", lambda config, mesh: make_splash(config, interpret=True))
    check_layout(case(row), tiny_config)
