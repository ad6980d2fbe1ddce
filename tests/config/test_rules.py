"""Remedies that messages propose."""

import pytest

from fiddlex.config import Config
from fiddlex.errors import ConfigError


@pytest.mark.parametrize(
    ("tensor", "head_dim", "remedy"),
    [
        (3, 0, r"Use mesh\.tensor 1, 2, 4\.$"),  # no multiple of 3 divides the 32 of hidden_size
        (3, 8, r"Use mesh\.tensor 1, 2, 4, or model\.num_heads 3 or 6\.$"),
        (8, 0, r"Use mesh\.tensor 1, 2, 4, or model\.num_heads 8 or 16\.$"),
    ],
)
def test_numbers_of_heads_that_are_proposed_fit(tensor: int, head_dim: int, remedy: str) -> None:
    config = Config()
    config.model.family, config.model.hidden_size, config.model.num_heads = "llama", 32, 4
    config.model.head_dim, config.mesh.tensor = head_dim, tensor
    with pytest.raises(ConfigError, match=remedy):
        config.validate()
