"""The architectures of Hugging Face's transformers that fiddlex computes: their `config.json` and the names of tensors.

`model_of` turns a `config.json` into the model section of a config, `config_json` makes one, and `Architecture.parts`
tells for each tensor of a folder which weight it is. An option that fiddlex does not compute is an error that names
the option and its value.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fiddlex.config import Config, ModelConfig
from fiddlex.errors import ConfigError

Json = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Part:
    """One tensor of a folder, and the weight, or the layer of a weight, that it is.

    Attributes:
      name: the tensor's name; in a layer, `{}` stands for the layer's number.
      path: the weight's keys.
      transposed: whether the tensor is stored as [outputs, inputs], as PyTorch's linear layers are.
    """

    name: str
    path: tuple[str, ...]
    transposed: bool = False


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What fiddlex knows of one class of models.

    Attributes:
      name: the name in `config.json`'s `architectures`.
      model_type: the name in its `model_type`.
      model_of: from a `config.json` to the model section of a config.
      json_of: from the model section to the fields of a `config.json` that depend on it.
      parts: the tensors of a model.
      fixed: options with the values that fiddlex computes; a missing option has the first of them.
      prefix: what the names of tensors begin with in this class and not in the class of the bare network.
      ignored: ends of names of tensors that older versions of transformers wrote and that hold no weights.
    """

    name: str
    model_type: str
    model_of: Callable[[Json], ModelConfig]
    json_of: Callable[[ModelConfig], Json]
    parts: Callable[[ModelConfig], list[Part]]
    fixed: Mapping[str, tuple[Any, ...]]
    prefix: str = ""
    ignored: tuple[str, ...] = ()


def _gpt2_model(json: Json) -> ModelConfig:
    return ModelConfig(
        family="gpt",
        num_layers=json["n_layer"],
        hidden_size=json["n_embd"],
        num_heads=json["n_head"],
        ffn_size=json.get("n_inner") or 0,
        vocab_size=json["vocab_size"],
        seq_len=json["n_positions"],
        layer_norm_epsilon=json.get("layer_norm_epsilon", 1e-5),
        gelu=_gelu(json.get("activation_function", "gelu_new")),
        init_std=json.get("initializer_range", 0.02),
    )


def _gpt2_json(model: ModelConfig) -> Json:
    return {
        "n_layer": model.num_layers,
        "n_embd": model.hidden_size,
        "n_head": model.num_heads,
        "n_inner": model.ffn_size or None,
        "vocab_size": model.vocab_size,
        "n_positions": model.seq_len,
        "layer_norm_epsilon": model.layer_norm_epsilon,
        "activation_function": "gelu_new" if model.gelu == "tanh" else "gelu",
        "initializer_range": model.init_std,
        "tie_word_embeddings": True,
    }


def _gpt2_parts(model: ModelConfig) -> list[Part]:
    del model
    layer = (
        *_norm("ln_1", ("layers", "attention_norm")),
        *_linear("attn.c_attn", ("layers", "attention", "qkv"), transposed=False),
        *_linear("attn.c_proj", ("layers", "attention", "out"), transposed=False),
        *_norm("ln_2", ("layers", "mlp_norm")),
        *_linear("mlp.c_fc", ("layers", "mlp", "up"), transposed=False),
        *_linear("mlp.c_proj", ("layers", "mlp", "down"), transposed=False),
    )
    return [
        Part("transformer.wte.weight", ("embedding", "tokens")),
        Part("transformer.wpe.weight", ("embedding", "positions")),
        *_in_layers("transformer.h", layer),
        *_norm("transformer.ln_f", ("head", "norm")),
    ]


def _llama_model(json: Json) -> ModelConfig:
    heads, hidden, width = json["num_attention_heads"], json["hidden_size"], json.get("head_dim")
    own_width = 0 if width is None or width * heads == hidden else width  # 0: that which follows from both
    return ModelConfig(
        family="llama",
        num_layers=json["num_hidden_layers"],
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=json.get("num_key_value_heads") or heads,
        head_dim=own_width,
        ffn_size=json["intermediate_size"],
        vocab_size=json["vocab_size"],
        seq_len=json["max_position_embeddings"],
        layer_norm_epsilon=json["rms_norm_eps"],
        init_std=json.get("initializer_range", 0.02),
        tied_embeddings=json.get("tie_word_embeddings", False),
        **_rope(json),
    )


def _qwen3_model(json: Json) -> ModelConfig:
    return dataclasses.replace(_llama_model({"head_dim": 128} | json), qk_norm=True)


def _rope(json: Json) -> dict[str, Any]:
    """The fields of rotary positions, as transformers writes them from version 5 on, or as it did before."""
    older = {"rope_theta": json.get("rope_theta", 10000.0), **(json.get("rope_scaling") or {})}
    rope = json.get("rope_parameters") or older
    kind = rope.get("rope_type", rope.get("type", "default"))
    fields = {"rope_base": float(rope.get("rope_theta", 10000.0))}
    if kind == "default":
        return fields
    if kind not in ("linear", "llama3"):
        raise ConfigError(f"rope_type={kind!r}: fiddlex has the rotary positions default, linear and llama3.")
    fields |= {"rope_scaling": kind, "rope_factor": float(rope["factor"])}
    if kind == "llama3":
        fields |= {
            "rope_low_frequency": float(rope["low_freq_factor"]),
            "rope_high_frequency": float(rope["high_freq_factor"]),
            "rope_original_len": rope["original_max_position_embeddings"],
        }
    return fields


def _llama_json(model: ModelConfig) -> Json:
    rope: Json = {"rope_type": "default", "rope_theta": model.rope_base}
    if model.rope_scaling != "none":
        rope |= {"rope_type": model.rope_scaling, "factor": model.rope_factor}
    if model.rope_scaling == "llama3":
        rope |= {
            "low_freq_factor": model.rope_low_frequency,
            "high_freq_factor": model.rope_high_frequency,
            "original_max_position_embeddings": model.rope_original_len,
        }
    return {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size,
        "intermediate_size": model.mlp_size,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.seq_len,
        "rms_norm_eps": model.layer_norm_epsilon,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tied_embeddings,
        "rope_parameters": rope,
        "hidden_act": "silu",
        "attention_bias": False,
    }


def _llama_parts(model: ModelConfig) -> list[Part]:
    def linear(name: str, *path: str) -> Part:
        return Part(f"{name}.weight", ("layers", *path, "kernel"), transposed=True)

    def scale(name: str, *path: str) -> Part:
        return Part(f"{name}.weight", (*path, "scale"))

    layer = [
        scale("input_layernorm", "layers", "attention_norm"),
        *(linear(f"self_attn.{each}_proj", "attention", each) for each in ("q", "k", "v")),
        linear("self_attn.o_proj", "attention", "out"),
        scale("post_attention_layernorm", "layers", "mlp_norm"),
        *(linear(f"mlp.{each}_proj", "mlp", each) for each in ("gate", "up", "down")),
    ]
    if model.qk_norm:
        layer += [scale(f"self_attn.{each}_norm", "layers", "attention", f"{each}_norm") for each in ("q", "k")]
    return [
        Part("model.embed_tokens.weight", ("embedding", "tokens")),
        *_in_layers("model.layers", layer),
        scale("model.norm", "head", "norm"),
        *([] if model.tied_embeddings else [Part("lm_head.weight", ("head", "output"))]),
    ]


def _in_layers(name: str, parts: Iterable[Part]) -> list[Part]:
    return [dataclasses.replace(part, name=f"{name}.{{}}.{part.name}") for part in parts]


def _norm(name: str, path: tuple[str, ...]) -> tuple[Part, Part]:
    return Part(f"{name}.weight", (*path, "scale")), Part(f"{name}.bias", (*path, "bias"))


def _linear(name: str, path: tuple[str, ...], *, transposed: bool) -> tuple[Part, Part]:
    kernel = Part(f"{name}.weight", (*path, "kernel"), transposed)
    return kernel, Part(f"{name}.bias", (*path, "bias"))


def _gelu(name: str) -> str:
    known = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "erf"}
    if name not in known:
        raise ConfigError(f"its activation is {name!r}: fiddlex has {', '.join(known)} here.")
    return known[name]


OLDER_FIELDS = ("rope_theta", "rope_scaling", "torch_dtype")  # which transformers writes elsewhere from version 5 on
_LLAMA_FIXED = {"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)}
ARCHITECTURES = {
    each.name: each
    for each in (
        Architecture(
            "GPT2LMHeadModel",
            "gpt2",
            _gpt2_model,
            _gpt2_json,
            _gpt2_parts,
            {
                "scale_attn_weights": (True,),
                "scale_attn_by_inverse_layer_idx": (False,),
                "add_cross_attention": (False,),
                "tie_word_embeddings": (True,),
            },
            prefix="transformer.",
            ignored=(".attn.bias", ".attn.masked_bias"),
        ),
        Architecture("LlamaForCausalLM", "llama", _llama_model, _llama_json, _llama_parts, _LLAMA_FIXED),
        Architecture("MistralForCausalLM", "mistral", _llama_model, _llama_json, _llama_parts, _LLAMA_FIXED),
        Architecture(
            "Qwen3ForCausalLM",
            "qwen3",
            _qwen3_model,
            _llama_json,
            _llama_parts,
            _LLAMA_FIXED | {"use_sliding_window": (False,)},
        ),
    )
}


def architecture_of(json: Json) -> Architecture:
    """The architecture of a `config.json`.

    Raises:
      ConfigError: when fiddlex does not have it, or it has an option that fiddlex does not compute.
    """
    names = json.get("architectures") or []
    if len(names) != 1 or names[0] not in ARCHITECTURES:
        raise ConfigError(f"architectures={names!r}: fiddlex has {', '.join(ARCHITECTURES)}.")
    found = ARCHITECTURES[names[0]]
    for option, values in found.fixed.items():
        if json.get(option, values[0]) not in values:
            raise ConfigError(f"{found.name} with {option}={json[option]!r}: fiddlex computes {option}={values[0]!r}.")
    return found


def model_of(json: Json) -> ModelConfig:
    """The model section of a config that computes what a `config.json` describes.

    Raises:
      ConfigError: when fiddlex does not compute it, or a field is missing or no valid value.
    """
    architecture = architecture_of(json)
    try:
        model = architecture.model_of(json)
    except KeyError as error:
        raise ConfigError(f"{architecture.name} without {error}, which gives a size.") from error
    window = json.get("sliding_window")
    if architecture.model_type == "mistral" and window is not None and window < model.seq_len:
        model.seq_len = window  # within the window, attention is that of the whole sequence
    model.validate()
    return model


def config_json(config: Config, base: Json | None = None) -> Json:
    """The `config.json` of a model.

    Args:
      config: the config of the run.
      base: the `config.json` that the run's weights came with, whose other fields are kept; None without one.

    Raises:
      ConfigError: when no architecture of transformers computes the model.
    """
    model = config.model
    if base is not None:
        architecture = architecture_of(base)
        kept = {name: value for name, value in base.items() if name not in OLDER_FIELDS}
        return kept | architecture.json_of(model)
    names = {("gpt", "lm"): "GPT2LMHeadModel", ("llama", "lm"): "LlamaForCausalLM"}
    name = names.get((model.family, model.task))
    if name is None:
        raise ConfigError(
            f"model.family={model.family} with model.objective={model.task}: no architecture of transformers is known "
            "that computes it."
        )
    if model.qk_norm:
        name = "Qwen3ForCausalLM"
    architecture = ARCHITECTURES[name]
    return {"architectures": [name], "model_type": architecture.model_type} | architecture.json_of(model)
