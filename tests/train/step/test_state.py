"""What the optimizer is told about each weight."""

import jax
import pytest

from fiddlex.config import Config
from fiddlex.models.registry import make_model
from fiddlex.train.step.state import make_blocks, make_layout
from tests.train.bert import of_task

MATRICES = {"kernel", "tokens", "positions", "token_types", "score"}


@pytest.mark.parametrize("task", ["lm", "mlm_nsp", "classification", "multiple_choice"])
def test_matrices_decay_and_norms_and_biases_do_not(task: str, tiny_config: Config) -> None:
    config = tiny_config if task == "lm" else of_task(tiny_config, task)
    config.mesh.pipe = config.mesh.tensor = 2
    padding = config.padded_vocab_size / config.model.vocab_size
    assert padding > 1
    model = make_model(config.validate())
    layout = make_layout(model, config)
    found = jax.tree.leaves_with_path(make_blocks(model, config))
    assert len(found) == len(jax.tree.leaves(layout.shapes))
    for path, block in found:
        names = [key.key for key in path]
        assert block.decay == (names[-1] in MATRICES), names
        assert block.stacked == (names[0] == "layers"), names
        assert (block.matrix is not None) == (names[0] == "layers" and names[-1] == "kernel"), names
        padded = names in (["embedding", "tokens"], ["head", "masked", "bias"])
        assert block.padding == (padding if padded else 1), names
