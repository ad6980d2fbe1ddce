import pathlib

import pytest

from fiddlex.config import Config
from fiddlex.config.files import load_config
from fiddlex.costs.sizes import hardware_flops, num_parameters, paper_num_parameters
from fiddlex.errors import ConfigError
from fiddlex.models.registry import make_model
from fiddlex.train.step.state import make_layout

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"

# Narayanan et al. 2021, table 1: parameters in billions, heads, hidden size, layers, tensor, pipe, GPUs, batch, TF/s.
SC21 = {
    "1.7b": (1.7, 24, 2304, 24, 1, 1, 32, 512, 137),
    "3.6b": (3.6, 32, 3072, 30, 2, 1, 64, 512, 138),
    "7.5b": (7.5, 32, 4096, 36, 4, 1, 128, 512, 142),
    "18.4b": (18.4, 48, 6144, 40, 8, 1, 256, 1024, 135),
    "39.1b": (39.1, 64, 8192, 48, 8, 2, 512, 1536, 138),
    "76.1b": (76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140),
    "145.6b": (145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148),
    "174.6b": (174.6, 96, 12288, 96, 8, 12, 384, 1536, 153),
    "310.1b": (310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155),
    "529.6b": (529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163),
    "1008b": (1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163),
}
GPT2_MILLIONS = {"small": 124, "medium": 355, "large": 774, "xl": 1558}
SCHEDULES = (
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "breadth_first",
    "zb_h1",
    "zb_h2",
    "zb_v",
    "v_half",
    "v_min",
    "dual_pipe_v",
    "uneven",
    "recompute",
    "2bw",
)
# Narayanan et al. 2021 (2BW), section 5: layers, hidden size, heads.
BERT_2BW = {"355m": (24, 1024, 16), "1.3b": (24, 2048, 16), "2.2b": (32, 2304, 32), "3.8b": (32, 3072, 32)}
# As the published weights have them, exactly.
LLAMA = {"1b": 1_235_814_400, "8b": 8_030_261_248, "70b": 70_553_706_496}
QWEN3 = {
    "0.6b": 596_049_920,
    "1.7b": 1_720_574_976,
    "4b": 4_022_468_096,
    "8b": 8_190_735_360,
    "14b": 14_768_307_200,
    "32b": 32_762_123_264,
}
ARGUMENTS = {
    "gpt3.py": SC21,
    "schedules.py": SCHEDULES,
    "bert_2bw.py": BERT_2BW,
    "llama.py": LLAMA,
    "qwen3.py": QWEN3,
    "huggingface.py": (),  # tests/interop/test_starting.py
}
SPECS = sorted(path.name for path in CONFIGS.glob("*.py") if path.name not in ARGUMENTS)
SPECS += ["gpt_tiny.py:2bw"]
SPECS += [f"{path}:{name}" for path, names in ARGUMENTS.items() for name in names]


def load(spec: str) -> Config:
    return load_config(str(CONFIGS / spec))


@pytest.mark.parametrize("spec", SPECS)
def test_config_is_valid(spec):
    config = load(spec)
    layout = make_layout(make_model(config.validate()), config)
    assert layout.placement.num_layers == config.model.num_layers
    if "uneven" not in spec:
        assert len(set(layout.placement.layers_per_stage)) == 1
    assert Config.from_json(config.to_json()) == config


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.py")), ids=lambda path: path.name)
def test_config_opens_with_the_command_that_runs_it(path):
    docstring = path.read_text().split('"""')[1]
    assert f"python experiments/train.py --config=configs/{path.name}" in docstring
    assert " --workdir=" in docstring


@pytest.mark.parametrize(("name", "millions"), GPT2_MILLIONS.items())
def test_gpt2_has_the_known_number_of_parameters(name, millions):
    config = load(f"gpt2_{name}.py")
    assert round(num_parameters(config) / 1e6) == millions
    assert config.padded_vocab_size % 128 == 0


@pytest.mark.parametrize(("name", "millions"), [("base", 110), ("large", 336)])
def test_bert_has_the_known_number_of_parameters(name, millions):
    assert round(num_parameters(load(f"bert_{name}.py")) / 1e6) == millions


@pytest.mark.parametrize(
    ("spec", "parameters"),
    [(f"{path}:{name}", number) for path in ("llama.py", "qwen3.py") for name, number in ARGUMENTS[path].items()],
)
def test_a_decoder_has_the_published_number_of_parameters(spec, parameters):
    assert num_parameters(load(spec)) == parameters


@pytest.mark.parametrize("name", BERT_2BW)
def test_2bw_model_is_the_papers(name):
    config = load(f"bert_2bw.py:{name}")
    model = config.model
    assert (model.num_layers, model.hidden_size, model.num_heads) == BERT_2BW[name]
    assert num_parameters(config) == pytest.approx(float(name[:-1]) * (1e6 if name[-1] == "m" else 1e9), rel=0.06)


@pytest.mark.parametrize("name", SC21)
def test_sc21_model_is_the_tables(name):
    billions, heads, hidden_size, layers, tensor, pipe, gpus, batch_size, _ = SC21[name]
    config = load(f"gpt3.py:{name}")
    model, mesh = config.model, config.mesh
    assert (model.num_heads, model.hidden_size, model.num_layers) == (heads, hidden_size, layers)
    assert (model.vocab_size, model.seq_len) == (51200, 2048)
    assert (mesh.tensor, mesh.pipe, config.data.global_batch_size) == (tensor, pipe, batch_size)
    assert mesh.data * mesh.pipe * mesh.tensor == gpus
    assert config.pipeline.num_microbatches * mesh.data == batch_size
    assert round(paper_num_parameters(model) / 1e9, 1) == billions


def test_a_trillion_parameters_take_the_84_days_of_the_paper():
    # Section 5.1: 450 billion tokens on 3072 GPUs at 163 TF/s, by 8TP/(nX). That leaves out the products of attention
    # that hold no weights, s/(6h) of the rest.
    config = load("gpt3.py:1008b")
    gpus, tflops = SC21["1008b"][6], SC21["1008b"][8]
    steps = 450e9 / config.tokens_per_step
    seconds = steps * hardware_flops(config) / (gpus * tflops * 1e12)
    assert seconds / 86400 == pytest.approx(84 * (1 + 2048 / (6 * 25600)), rel=0.003)


@pytest.mark.parametrize(
    ("spec", "known"),
    [
        ("gpt3.py", r"1\.7b\|.*\|1008b"),
        ("gpt3.py:175b", r"1\.7b\|.*\|1008b"),
        ("schedules.py:dapple", r"gpipe\|1f1b\|"),
    ],
)
def test_unknown_argument_lists_the_known(spec, known):
    with pytest.raises(ConfigError, match=known):
        load(spec)
