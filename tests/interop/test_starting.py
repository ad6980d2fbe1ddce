"""configs/huggingface.py: the config of a run that starts from a folder."""

import pathlib

import numpy as np
import pytest
import tokenizers

from fiddlex.config.files import load_config
from fiddlex.config.overrides import replaced
from fiddlex.errors import ConfigError
from fiddlex.train.trainer import Trainer
from tests.interop.folders import CONFIGS, make_folder

FILE = pathlib.Path(__file__).parents[2] / "configs" / "huggingface.py"


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_needs_no_size_written_by_hand(name: str, tmp_path: pathlib.Path) -> None:
    make_folder(tmp_path / "hf", name)
    config = load_config(f"{FILE}:{tmp_path / 'hf'}").validate()
    assert config.train.init_from == f"hf:{tmp_path / 'hf'}"
    assert (config.model.num_layers, config.model.hidden_size, config.model.vocab_size) == (4, 32, 257)
    assert config.data.labels == ("no,yes,can't tell" if "Classification" in name else "")


def test_a_run_starts_with_the_weights_and_the_tokenizer_of_the_folder(
    tmp_path: pathlib.Path, text_file: pathlib.Path
) -> None:
    folder = tmp_path / "hf"
    tensors = make_folder(folder, "GPT2LMHeadModel", n_positions=2048)
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator([text_file.read_text()], vocab_size=257)
    made.save_model(str(folder))
    with pytest.raises(ConfigError, match="has a tokenizer in an older form"):
        load_config(f"{FILE}:{folder}")
    made.save(str(folder / "tokenizer.json"))
    config = load_config(f"{FILE}:{folder}")
    assert config.model.seq_len == 1024
    assert config.data.tokenizer == str(folder / "tokenizer.json")
    config = replaced(config, {"data.source": f"text:{text_file}", "model.seq_len": 16})
    trainer = Trainer(config)
    trainer.start_from(config.train.init_from)
    positions = trainer.weights()["embedding"]["positions"]
    np.testing.assert_array_equal(positions, tensors["transformer.wpe.weight"][:16])


def test_a_missing_folder_is_told(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=r"use --config=huggingface:DIR"):
        load_config(f"{FILE}")
    with pytest.raises(ConfigError, match=r"config\.json does not exist: hf:.*none is not a folder"):
        load_config(f"{FILE}:{tmp_path / 'none'}")
