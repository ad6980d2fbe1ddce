"""Configs by name, and the arguments of config files."""

import json
import pathlib
import shutil

import pytest

import fiddlex
from fiddlex.config.files import config_names, describe, load_config, named_configs
from fiddlex.errors import ConfigError
from tests.programs import ROOT, call

CONFIGS = ROOT / "configs"
OWN = """
from fiddlex.config import Config, ModelConfig

ARGUMENTS = ("", "deep")

def get_config(name=""):
    return Config(model=ModelConfig(num_layers=8 if name else 2))
"""


def own(folder: pathlib.Path, name: str, text: str = OWN) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_the_names_are_the_files_of_configs():
    assert config_names() == sorted(path.stem for path in CONFIGS.glob("*.py"))
    for config in named_configs():
        docstring = (CONFIGS / f"{config.name}.py").read_text(encoding="utf-8").split('"""')[1]
        assert docstring.startswith(f"{config.summary}\n")


@pytest.mark.parametrize("spec", ["gpt_tiny", "gpt_tiny:2bw", "llama:8b", "bert_2bw:1.3b"])
def test_a_name_gives_the_config_of_its_file(spec, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name, colon, argument = spec.partition(":")
    assert load_config(spec) == load_config(f"{CONFIGS}/{name}.py{colon}{argument}")


def test_every_argument_that_a_config_lists_is_one():
    found = {f"{config.name}:{argument}" for config in named_configs() for argument in config.arguments}
    assert {"llama:70b", "gpt3:1008b", "gpt_tiny:2bw", "gpt_tiny:", "schedules:zb_v", "qwen3:0.6b"} <= found
    assert len({load_config(spec).to_json() for spec in found}) == len(found)


def test_a_file_that_exists_goes_before_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own(tmp_path, "gpt_tiny")
    assert load_config("gpt_tiny").model.num_layers == 2
    assert load_config("gpt_tiny:deep").model.num_layers == 8
    (tmp_path / "gpt_tiny").unlink()
    (tmp_path / "gpt_tiny").mkdir()  # a workdir, for example
    assert load_config("gpt_tiny").model.hidden_size == 128


def test_the_configs_of_an_installed_package_are_those_beside_its_modules(tmp_path, monkeypatch):
    package = tmp_path / "site-packages" / "fiddlex"
    shutil.copytree(CONFIGS, package / "configs")
    (package / "configs" / "gpt_tiny.py").write_text(OWN)
    monkeypatch.setattr(fiddlex, "__file__", str(package / "__init__.py"))
    assert load_config("gpt_tiny").model.num_layers == 2
    own(package / "configs", "llama.py", OWN.replace("8 if name", "'many' if name"))
    with pytest.raises(ConfigError, match=f"^{package}/configs/llama.py, line 7: "):
        load_config("llama:deep")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gpt_tny", "there is no config 'gpt_tny'. Did you mean gpt_tiny or bert_tiny? `fiddlex configs` lists those"),
        ("lama:8b", "there is no config 'lama'. Did you mean llama? "),
        ("zzz", "there is no config 'zzz'. `fiddlex configs` lists those that fiddlex comes with. Name a file of your"),
        ("", "--config is empty. Name a config that"),
        ("configs/gpt_tiny.py", "/configs/gpt_tiny.py. fiddlex comes with a config of that name: --config=gpt_tiny."),
        ("mine.py", "/mine.py."),
        ("llama", "the config llama needs an argument; use --config=llama:1b|8b|70b."),
        ("llama:9b", "the config llama takes no argument '9b'; use --config=llama:1b|8b|70b."),
        ("gpt_tiny:3bw", "takes no argument '3bw'; use --config=gpt_tiny or --config=gpt_tiny:2bw."),
        ("own.py:deeper", "the config own.py takes no argument 'deeper'; use --config=own.py or --config=own.py:deep."),
    ],
)
def test_mistakes(spec, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own(tmp_path, "own.py")
    with pytest.raises(ConfigError) as raised:
        load_config(spec)
    assert message in str(raised.value)


def test_a_file_that_lists_no_arguments_takes_any(tmp_path):
    path = own(tmp_path, "own.py", OWN.replace('ARGUMENTS = ("", "deep")', ""))
    assert load_config(f"{path}:anything").model.num_layers == 8
    assert describe(path)[1:] == ((), "name", "")


def test_the_list(tmp_path):
    lines = call("fiddlex", "configs", cwd=tmp_path).stdout.splitlines()
    assert "gpt_tiny     A byte-level GPT small enough for a laptop's CPU" in "\n".join(lines)
    assert {"gpt_tiny[:2bw]", "llama:1b|8b|70b", "huggingface:FOLDER"} <= {line.strip() for line in lines}
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == config_names()
    listed = json.loads(call("fiddlex", "configs", "--format=json", cwd=tmp_path).stdout)["configs"]
    assert [config["name"] for config in listed] == config_names()
    llama = listed[config_names().index("llama")]
    assert (llama["arguments"], llama["parameter"]) == (["1b", "8b", "70b"], "name")
