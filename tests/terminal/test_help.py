"""`--help` says what each field of the config means, and names its choices; the comments beside the fields say it."""

import dataclasses
import inspect
import operator
import re

import pytest

from fiddlex.config import Config
from fiddlex.config.config import field_paths
from fiddlex.config.overrides import replaced
from fiddlex.errors import ConfigError
from fiddlex.terminal.help import field_comments

TEXTS = [path for path in field_paths() if isinstance(operator.attrgetter(path)(Config()), str)]
SECTIONS = {field.name: field.default_factory for field in dataclasses.fields(Config)}


def text_of(path: str) -> str:
    section, _, name = path.partition(".")
    return field_comments(inspect.getsource(SECTIONS[section]))[name]


@pytest.mark.parametrize("path", field_paths())
def test_each_field_says_what_it_means(path: str) -> None:
    assert len(text_of(path).split()) >= 3


def test_texts_are_the_comments() -> None:
    assert text_of("mesh.pipe") == "pipeline ranks, each with pipeline.num_chunks stages"
    assert text_of("train.on_nonfinite").endswith("stop | skip (the update) | rollback")  # a comment with a bracket


@pytest.mark.parametrize("path", TEXTS)
def test_a_field_that_takes_one_of_several_words_names_them_all(path: str) -> None:
    """What the field's own check lists as its choices stands in its text."""
    section, _, _ = path.partition(".")
    try:
        getattr(replaced(Config(), {path: "zzz"}), section).validate()
    except ConfigError as error:
        if choices := re.search(r"='zzz' is not one of ([\w., ]+)\.", str(error)):
            words = set(re.findall(r"[\w]+", text_of(path)))
            assert words >= set(choices[1].split(", "))


@pytest.mark.parametrize("path", [path for path in field_paths() if re.search("_(s|h|gib)$", path)])
def test_a_field_with_a_unit_in_its_name_says_the_unit(path: str) -> None:
    unit = {"s": "seconds", "h": "hours", "gib": "GiB"}[path.rpartition("_")[2]]
    assert unit in text_of(path)
