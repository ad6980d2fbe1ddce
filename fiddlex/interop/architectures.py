"""The architectures of Hugging Face's transformers that fiddlex computes, and the way from and to a `config.json`.

An option that fiddlex does not compute is an error that names the option and its value.
"""

from typing import Any

from fiddlex.config import Config, ModelConfig
from fiddlex.errors import ConfigError
from fiddlex.interop.architecture import Architecture
from fiddlex.interop.bert import BERTS
from fiddlex.interop.decoders import DECODERS
from fiddlex.interop.options import Json, Options
from fiddlex.terminal.readable import shown

# Fields that transformers writes elsewhere from version 5 on.
OLDER_FIELDS = ("rope_theta", "rope_scaling", "original_max_position_embeddings", "torch_dtype")
ARCHITECTURES = {each.name: each for each in (*DECODERS, *BERTS)}


def architecture_of(json: Json) -> Architecture:
    """The architecture of a `config.json`; one that names no class is that of the only decoder of its type."""
    names = json.get("architectures")
    if names is None:
        names = [each.name for each in DECODERS if each.model_type == json.get("model_type")]
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    found = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if found is None:
        raise ConfigError(
            f"architectures={shown(json.get('architectures'))}: fiddlex has {', '.join(ARCHITECTURES)}, one at a time."
        )
    if (kind := json.get("model_type", found.model_type)) != found.model_type:
        raise ConfigError(
            f"architectures=[{found.name!r}] with model_type={shown(kind)}: a {found.name} has model_type="
            f"{found.model_type!r}, and transformers would load another model. Correct the one that is wrong."
        )
    for option, values in found.fixed.items():
        if json.get(option, values[0]) not in values:
            raise ConfigError(
                f"{found.name} with {option}={shown(json[option])}: fiddlex computes {option}={values[0]!r}."
            )
    return found


def model_of(json: Json) -> ModelConfig:
    """The model section for a `config.json`, in which missing options have the defaults of transformers."""
    architecture = architecture_of(json)
    values = dict(json)
    for alias, name in architecture.aliases.items():
        if alias in json and values.setdefault(name, json[alias]) != json[alias]:
            raise ConfigError(
                f"{alias}={shown(json[alias])} and {name}={shown(json[name])}: both are the same option of a "
                f"{architecture.name}. Remove {alias}, or make them equal."
            )
    model = architecture.model_of(Options(values, architecture.defaults))
    model.validate()
    return model


def sliding_window(json: Json) -> int | None:
    """The sliding window of a model's attention, in tokens; None where attention spans the whole sequence.

    In sequences that are no longer, attention is the same with and without the window. No other option is checked: a
    workdir may keep a `config.json` that an earlier version of fiddlex took and `model_of` refuses.
    """
    mistral = ARCHITECTURES["MistralForCausalLM"]  # the only one that fiddlex computes within its window
    names = json.get("architectures")
    if names != [mistral.name] and (names is not None or json.get("model_type") != mistral.model_type):
        return None
    return Options(json, mistral.defaults).optional_size("sliding_window")


def settings_of(json: Json) -> dict[str, Any]:
    """The fields that a `config.json` determines, by their paths: `model`, and for classes `data.labels`."""
    settings: dict[str, Any] = {"model": model_of(json)}
    if classes_of := architecture_of(json).classes_of:
        settings["data.labels"] = ",".join(classes_of(json))
    return settings


def config_json(config: Config, base: Json | None = None) -> Json:
    """The `config.json` of a model; keeps other fields of `base`, the one that the run's weights came with."""
    model = config.model
    if base is not None:
        architecture = architecture_of(base)
        replaced = {*OLDER_FIELDS, *architecture.aliases}
        kept = {name: value for name, value in base.items() if name not in replaced}
        return kept | architecture.json_of(config)
    names = {
        ("gpt", "lm"): "GPT2LMHeadModel",
        ("llama", "lm"): "LlamaForCausalLM",
        ("bert", "mlm"): "BertForMaskedLM",
        ("bert", "mlm_nsp"): "BertForPreTraining",
        ("bert", "mlm_sop"): "BertForPreTraining",
        ("bert", "classification"): "BertForSequenceClassification",
    }
    name = names.get((model.family, model.task))
    if name is None or (model.qk_norm and model.qkv_bias):
        raise ConfigError(
            f"model.family={model.family} with model.objective={model.task}, qk_norm={model.qk_norm} and qkv_bias="
            f"{model.qkv_bias}: no architecture of transformers is known that computes it."
        )
    if model.qk_norm:
        name = "Qwen3ForCausalLM"
    if model.qkv_bias:
        name = "Qwen2ForCausalLM"
    architecture = ARCHITECTURES[name]
    return {"architectures": [name], "model_type": architecture.model_type} | architecture.json_of(config)
