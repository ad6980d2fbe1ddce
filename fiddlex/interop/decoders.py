"""The decoders of transformers that fiddlex computes: GPT-2, Llama, Mistral and Qwen3."""

import dataclasses
from typing import Any

from fiddlex.config import Config, ModelConfig
from fiddlex.errors import ConfigError
from fiddlex.interop.architecture import Architecture, Json, Part, dropout, gelu, gelu_name, in_layers, linear, norm


def gpt2_model(json: Json) -> ModelConfig:
    """The model section of a config for the `config.json` of a GPT-2."""
    return ModelConfig(
        family="gpt",
        num_layers=json["n_layer"],
        hidden_size=json["n_embd"],
        num_heads=json["n_head"],
        ffn_size=json.get("n_inner") or 0,
        vocab_size=json["vocab_size"],
        seq_len=json["n_positions"],
        layer_norm_epsilon=json.get("layer_norm_epsilon", 1e-5),
        gelu=gelu("activation_function", json.get("activation_function", "gelu_new")),
        init_std=json.get("initializer_range", 0.02),
        dropout=dropout(json, "resid_pdrop", "embd_pdrop", "attn_pdrop"),
    )


def gpt2_json(config: Config) -> Json:
    """The fields of a `config.json` that depend on a config."""
    model = config.model
    return {
        "n_layer": model.num_layers,
        "n_embd": model.hidden_size,
        "n_head": model.num_heads,
        "n_inner": model.ffn_size or None,
        "vocab_size": model.vocab_size,
        "n_positions": model.seq_len,
        "layer_norm_epsilon": model.layer_norm_epsilon,
        "activation_function": gelu_name(model),
        "initializer_range": model.init_std,
        "tie_word_embeddings": True,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), model.dropout),
    }


def gpt2_parts(model: ModelConfig) -> list[Part]:
    """The tensors of a GPT-2, whose products store [inputs, outputs]."""
    del model
    layer = (
        *norm("ln_1", ("layers", "attention_norm")),
        *linear("attn.c_attn", ("layers", "attention", "qkv"), transposed=False),
        *linear("attn.c_proj", ("layers", "attention", "out"), transposed=False),
        *norm("ln_2", ("layers", "mlp_norm")),
        *linear("mlp.c_fc", ("layers", "mlp", "up"), transposed=False),
        *linear("mlp.c_proj", ("layers", "mlp", "down"), transposed=False),
    )
    return [
        Part("transformer.wte.weight", ("embedding", "tokens")),
        Part("transformer.wpe.weight", ("embedding", "positions")),
        *in_layers("transformer.h", layer),
        *norm("transformer.ln_f", ("head", "norm")),
    ]


def llama_model(json: Json) -> ModelConfig:
    """The model section of a config for the `config.json` of a Llama or a Mistral."""
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


def qwen3_model(json: Json) -> ModelConfig:
    """The model section of a config for the `config.json` of a Qwen3."""
    return dataclasses.replace(llama_model({"head_dim": 128} | json), qk_norm=True)


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


def llama_json(config: Config) -> Json:
    """The fields of a `config.json` that depend on a config."""
    model = config.model
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


def llama_parts(model: ModelConfig) -> list[Part]:
    """The tensors of a Llama, a Mistral or a Qwen3."""

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
        *in_layers("model.layers", layer),
        scale("model.norm", "head", "norm"),
        *([] if model.tied_embeddings else [Part("lm_head.weight", ("head", "output"))]),
    ]


_LLAMA_FIXED = {"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)}
_LLAMA_COPIES = {"lm_head.weight": "model.embed_tokens.weight"}
DECODERS = (
    Architecture(
        "GPT2LMHeadModel",
        "gpt2",
        gpt2_model,
        gpt2_json,
        gpt2_parts,
        {
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
            "tie_word_embeddings": (True,),
        },
        prefix="transformer.",
        copies={"lm_head.weight": "transformer.wte.weight"},
        ignored=(".attn.bias", ".attn.masked_bias"),
    ),
    Architecture("LlamaForCausalLM", "llama", llama_model, llama_json, llama_parts, _LLAMA_FIXED, copies=_LLAMA_COPIES),
    Architecture(
        "MistralForCausalLM", "mistral", llama_model, llama_json, llama_parts, _LLAMA_FIXED, copies=_LLAMA_COPIES
    ),
    Architecture(
        "Qwen3ForCausalLM",
        "qwen3",
        qwen3_model,
        llama_json,
        llama_parts,
        _LLAMA_FIXED | {"use_sliding_window": (False,)},
        copies=_LLAMA_COPIES,
    ),
)
