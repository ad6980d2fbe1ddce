"""Fields of a config set by path and by text."""

import pytest

from fiddlex.config import Config
from fiddlex.config.overrides import is_field, override, replaced
from fiddlex.errors import ConfigError


def test_texts_are_read_in_the_type_of_the_field_and_the_config_is_left_as_it_is():
    config = Config()
    changed = override(config, "mesh.pipe=4", "optimizer.zero1=false", "model.dropout=0.5", "data.source=text:a=b")
    assert (changed.mesh.pipe, changed.optimizer.zero1, changed.model.dropout) == (4, False, 0.5)
    assert changed.data.source == "text:a=b"
    assert config == Config()


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("mesh.pip=4", "config.mesh has no field 'pip'. Did you mean 'pipe'?"),
        ("mesh.pipe", "'mesh.pipe': write section.field=value, as in mesh.pipe=4."),
        ("mesh=4", "'mesh=4': write section.field=value, as in mesh.pipe=4."),
        ("mesh.pipe=two", "mesh.pipe=two must be of type int."),
        ("train.checkpoint_every=often", "train.checkpoint_every=often must be of type int, or auto."),
        ("optimizer.zero1=2", "optimizer.zero1=2: write true or false."),
    ],
)
def test_what_says_no_value_of_a_field_is_refused(assignment, message):
    with pytest.raises(ConfigError) as error:
        override(Config(), assignment)
    assert str(error.value) == message


def test_a_value_of_another_type_or_of_no_field_is_refused():
    with pytest.raises(ConfigError, match="has no field 'pip'"):
        replaced(Config(), {"mesh.pip": 4})
    with pytest.raises(ConfigError, match=r"config\.mesh\.pipe"):
        replaced(Config(), {"mesh.pipe": "4"})


def test_fields_are_told_from_sections_and_values():
    assert is_field("mesh.pipe")
    assert not any(map(is_field, ("mesh", "pipe", "mesh.pipe.x", "model.validate")))
