"""fiddlex's files, splits, samples and blends beside those of megatron-core, which the tests' own extra lacks."""

import pathlib
from typing import Any

import numpy as np
import pytest

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]  # of warnings in megatron-core and torch


@pytest.fixture
def readers() -> Any:
    pytest.importorskip("torch")
    pytest.importorskip("megatron.core")
    from third_party.megatron import compare_readers

    return compare_readers


def test_files_are_read_both_ways(readers: Any, tmp_path: pathlib.Path) -> None:
    assert "6 dtypes" in readers.compare_files(tmp_path, np.random.default_rng(0))


def test_splits_have_the_same_edges(readers: Any) -> None:
    assert "6 of 2,000 sizes" in readers.compare_splits()


def test_samples_are_at_the_same_places(readers: Any, tmp_path: pathlib.Path) -> None:
    assert "24 epochs" in readers.compare_samples(tmp_path, np.random.default_rng(0))


def test_blends_take_what_lags_most(readers: Any) -> None:
    assert "never differ by over 1" in readers.compare_blends()
