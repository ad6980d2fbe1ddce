"""The decoders of transformers that fiddlex computes: GPT-2, Llama, Mistral, Qwen2 and Qwen3."""

import dataclasses
from typing import Any

from fiddlex.config import Config, ModelConfig
from fiddlex.errors import ConfigError
from fiddlex.interop.architecture import FIXED, Architecture, Part, dropout, gelu, gelu_name, in_layers, linear, norm
from fiddlex.interop.options import Json, Options


def gpt2_model(options: Options) -> ModelConfig:
    return ModelConfig(
        family="gpt",
        num_layers=options.size("n_layer"),
        hidden_size=options.size("n_embd"),
        num_heads=options.size("n_head"),
        ffn_size=options.optional_size("n_inner") or 0,
        vocab_size=options.size("vocab_size"),
        seq_len=options.size("n_positions"),
        layer_norm_epsilon=options.number("layer_norm_epsilon"),
        gelu=gelu(options, "activation_function"),
        init_std=options.number("initializer_range"),
        dropout=dropout(options, "resid_pdrop", "embd_pdrop", "attn_pdrop"),
        tied_embeddings=options.flag("tie_word_embeddings"),
    )


def gpt2_json(config: Config) -> Json:
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
        "tie_word_embeddings": model.tied_embeddings,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), model.dropout),
    }


def gpt2_parts(model: ModelConfig) -> list[Part]:
    """The tensors of a GPT-2, whose products store [inputs, outputs]."""
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
        *_own_table(model),
    ]


def _own_table(model: ModelConfig) -> list[Part]:
    """The table that scores the vocabulary, where it is another one than the embedding's."""
    return [] if model.tied_embeddings else [Part("lm_head.weight", ("head", "output"))]


def llama_model(options: Options) -> ModelConfig:
    if options.number("attention_dropout"):
        raise ConfigError(
            f"{options.named('attention_dropout')}: fiddlex has one rate of dropout for attention, embeddings and both "
            "branches. Write 0; no weight depends on it."
        )
    heads, hidden = options.size("num_attention_heads"), options.size("hidden_size")
    width = options.optional_size("head_dim")
    own_width = 0 if width is None or width * heads == hidden else width  # 0: that which follows from both
    return ModelConfig(
        family="llama",
        num_layers=options.size("num_hidden_layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=options.optional_size("num_key_value_heads") or heads,
        head_dim=own_width,
        ffn_size=options.size("intermediate_size"),
        vocab_size=options.size("vocab_size"),
        seq_len=options.size("max_position_embeddings"),
        layer_norm_epsilon=options.number("rms_norm_eps"),
        init_std=options.number("initializer_range"),
        tied_embeddings=options.flag("tie_word_embeddings"),
        **_rope(options),
    )


def mistral_model(options: Options) -> ModelConfig:
    model = llama_model(options)
    window = options.optional_size("sliding_window")
    if window is not None:
        model.seq_len = min(window, model.seq_len)  # within the window, attention is that of the whole sequence
    return model


def qwen2_model(options: Options) -> ModelConfig:
    model = llama_model(options)
    _check_full_attention(options, model.num_layers)
    return dataclasses.replace(model, qkv_bias=True)  # which a Qwen2 always has


def qwen3_model(options: Options) -> ModelConfig:
    options.size("head_dim")  # the width of a head, which follows from no other option
    model = llama_model(options)
    _check_full_attention(options, model.num_layers)
    return dataclasses.replace(model, qk_norm=True)


def _check_full_attention(options: Options, num_layers: int) -> None:
    """Raises ConfigError when layers have a sliding window: those that `layer_types` names, else the last ones."""
    kinds = options.values.get("layer_types")
    names: tuple[str, ...] = ("use_sliding_window", "sliding_window", "max_window_layers")
    window, first = options.optional_size(names[1]), options.number(names[2])
    full = not options.flag(names[0]) or window is None or first >= num_layers
    if kinds is not None:
        names = ("layer_types",)
        full = isinstance(kinds, list) and kinds.count("full_attention") == len(kinds) == num_layers
    if not full:
        raise ConfigError(
            f"{', '.join(map(options.named, names))} with num_hidden_layers={num_layers}: fiddlex computes a Qwen with "
            "'full_attention' in each layer."
        )


def _rope(options: Options) -> dict[str, Any]:
    """The fields of rotary positions.

    transformers writes them to `rope_parameters` from version 5 on, and wrote them to `rope_theta` and `rope_scaling`
    before. Where both are there it takes `rope_scaling`, and `rope_theta` where the object that it takes has none. For
    llama3 it takes the `original_max_position_embeddings` outside of the object, then that in the object, then
    `max_position_embeddings`.
    """
    older, newer = options.object("rope_scaling"), options.object("rope_parameters")
    rope = older or newer
    for name, value in rope.values.items():
        if isinstance(value, dict):
            raise ConfigError(f"{rope.named(name)}: fiddlex has the same rotary positions in every layer.")
    for each in (options, rope):
        if each.values.get("partial_rotary_factor") is not None and each.number("partial_rotary_factor") != 1:
            raise ConfigError(f"{each.named('partial_rotary_factor')}: fiddlex turns all elements of a head.")
    kind = "default"
    if name := next((name for name in ("rope_type", "type") if name in rope), ""):
        kind = rope.text(name)
    if kind not in ("default", "linear", "llama3"):
        raise ConfigError(f"{rope.named(name)}: fiddlex has the rotary positions default, linear and llama3.")
    fields: dict[str, Any] = {"rope_base": (rope if "rope_theta" in rope else options).number("rope_theta")}
    if kind == "default":
        return fields
    fields |= {"rope_scaling": kind, "rope_factor": rope.number("factor")}
    if kind == "llama3":
        name = "original_max_position_embeddings"
        holder = options if name in options else rope
        fields |= {
            "rope_low_frequency": rope.number("low_freq_factor"),
            "rope_high_frequency": rope.number("high_freq_factor"),
            "rope_original_len": holder.size(name) if name in holder else options.size("max_position_embeddings"),
        }
    return fields


def llama_json(config: Config) -> Json:
    model = config.model
    if model.hidden_size % model.num_heads:
        raise ConfigError(
            f"model.hidden_size={model.hidden_size} is not a multiple of model.num_heads={model.num_heads}: "
            "transformers takes no LlamaForCausalLM of these sizes, whatever its head_dim."
        )
    return rotary_json(config)


def rotary_json(config: Config) -> Json:
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
        **({} if model.qkv_bias else {"attention_bias": False}),  # which no Qwen2 has
    }


def llama_parts(model: ModelConfig) -> list[Part]:
    """The tensors of a Llama, a Mistral, a Qwen2 or a Qwen3."""

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
    if model.qkv_bias:
        layer += [
            Part(f"self_attn.{each}_proj.bias", ("layers", "attention", each, "bias")) for each in ("q", "k", "v")
        ]
    if model.qk_norm:
        layer += [scale(f"self_attn.{each}_norm", "layers", "attention", f"{each}_norm") for each in ("q", "k")]
    return [
        Part("model.embed_tokens.weight", ("embedding", "tokens")),
        *in_layers("model.layers", layer),
        scale("model.norm", "head", "norm"),
        *_own_table(model),
    ]


_CAUSAL = {**FIXED, "is_causal": (True,)}
_LLAMA_FIXED = {**_CAUSAL, "hidden_act": ("silu", "swish"), "attention_bias": (False,), "mlp_bias": (False,)}
_LLAMA_TENSORS: Any = {
    "copies": {"lm_head.weight": "model.embed_tokens.weight"},
    "ignored": (".rotary_emb.inv_freq",),
}
_GPT2_DEFAULTS = {
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "activation_function": "gelu_new",
    "tie_word_embeddings": True,
    "layer_norm_epsilon": 1e-5,
    "initializer_range": 0.02,
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1),
}
_LLAMA_DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "attention_dropout": 0.0,
}
_MISTRAL_DEFAULTS = _LLAMA_DEFAULTS | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096 * 32,
    "sliding_window": 4096,
}
_QWEN2_DEFAULTS = _LLAMA_DEFAULTS | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_QWEN3_DEFAULTS = _QWEN2_DEFAULTS | {"head_dim": 128}
DECODERS = (
    Architecture(
        "GPT2LMHeadModel",
        "gpt2",
        gpt2_model,
        gpt2_json,
        gpt2_parts,
        _GPT2_DEFAULTS,
        {
            **_CAUSAL,
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        aliases={
            "hidden_size": "n_embd",
            "max_position_embeddings": "n_positions",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        },
        prefix="transformer.",
        copies={"lm_head.weight": "transformer.wte.weight"},
        ignored=(".attn.bias", ".attn.masked_bias"),
    ),
    Architecture(
        "LlamaForCausalLM",
        "llama",
        llama_model,
        llama_json,
        llama_parts,
        _LLAMA_DEFAULTS,
        _LLAMA_FIXED,
        **_LLAMA_TENSORS,
    ),
    Architecture(
        "MistralForCausalLM",
        "mistral",
        mistral_model,
        rotary_json,
        llama_parts,
        _MISTRAL_DEFAULTS,
        _LLAMA_FIXED,
        **_LLAMA_TENSORS,
    ),
    Architecture(
        "Qwen2ForCausalLM",
        "qwen2",
        qwen2_model,
        rotary_json,
        llama_parts,
        _QWEN2_DEFAULTS,
        {**_CAUSAL, "hidden_act": _LLAMA_FIXED["hidden_act"]},
        **_LLAMA_TENSORS,
    ),
    Architecture(
        "Qwen3ForCausalLM",
        "qwen3",
        qwen3_model,
        rotary_json,
        llama_parts,
        _QWEN3_DEFAULTS,
        _LLAMA_FIXED,
        **_LLAMA_TENSORS,
    ),
)
