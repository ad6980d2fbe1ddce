"""Small folders of each class, with random tensors, written without transformers."""

import json
import pathlib
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy

from fiddlex.config import Config
from fiddlex.config.overrides import replaced
from fiddlex.interop.architectures import ARCHITECTURES

LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 257,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-6,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
BERT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 257,
    "max_position_embeddings": 32,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {
        "n_embd": 32,
        "n_layer": 4,
        "n_head": 4,
        "vocab_size": 257,
        "n_positions": 32,
        "dtype": "float32",
    },
    "LlamaForCausalLM": LLAMA
    | {
        "rope_theta": 500.0,
        "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 16},
        "torch_dtype": "bfloat16",
    },
    "MistralForCausalLM": LLAMA | {"sliding_window": 4096, "eos_token_id": 2},
    "BertForPreTraining": BERT | {"dtype": "bfloat16"},
    "BertForMaskedLM": BERT | {"hidden_act": "gelu_new", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0},
    "BertForSequenceClassification": BERT | {"id2label": {"0": "no", "1": "yes", "2": "can't tell"}, "eos_token_id": 7},
    "Qwen2ForCausalLM": LLAMA
    | {"dtype": "float32", "rope_theta": 1e6, "sliding_window": 8, "use_sliding_window": False},
    "Qwen3ForCausalLM": LLAMA | {"head_dim": 10, "tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e6}},
}


def shapes(json: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a folder, from transformers' classes."""
    if "n_embd" in json:
        h, f = json["n_embd"], 4 * json["n_embd"]
        layer = {"ln_1": (h,), "attn.c_attn": (h, 3 * h), "attn.c_proj": (h, h), "ln_2": (h,)}
        layer |= {"mlp.c_fc": (h, f), "mlp.c_proj": (f, h)}
        found = {"transformer.wte.weight": (json["vocab_size"], h), "transformer.wpe.weight": (json["n_positions"], h)}
        for name, shape in [(f"h.{i}.{name}", s) for i in range(4) for name, s in layer.items()] + [("ln_f", (h,))]:
            found |= {f"transformer.{name}.weight": shape, f"transformer.{name}.bias": shape[-1:]}
        return found if json.get("tie_word_embeddings", True) else found | {"lm_head.weight": (json["vocab_size"], h)}
    if "num_key_value_heads" not in json:
        return bert_shapes(json)
    h, f = json["hidden_size"], json["intermediate_size"]
    size = json.get("head_dim", h // 4)
    layer = {"input_layernorm": (h,), "post_attention_layernorm": (h,), "self_attn.o_proj": (h, 4 * size)}
    layer |= {"self_attn.q_proj": (4 * size, h), "self_attn.k_proj": (2 * size, h), "self_attn.v_proj": (2 * size, h)}
    layer |= {"mlp.gate_proj": (f, h), "mlp.up_proj": (f, h), "mlp.down_proj": (h, f)}
    if "head_dim" in json:
        layer |= {"self_attn.q_norm": (size,), "self_attn.k_norm": (size,)}
    found = {f"model.layers.{i}.{name}.weight": shape for i in range(4) for name, shape in layer.items()}
    if json["model_type"] == "qwen2":
        heads = {"q": 4 * size, "k": 2 * size, "v": 2 * size}
        found |= {f"model.layers.{i}.self_attn.{each}_proj.bias": (n,) for i in range(4) for each, n in heads.items()}
    found |= {"model.embed_tokens.weight": (257, h), "model.norm.weight": (h,)}
    return found if json.get("tie_word_embeddings") else found | {"lm_head.weight": (257, h)}


def bert_shapes(json: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a BERT as transformers' classes have them: a weight is [outputs, inputs]."""
    h, f, (name,) = json["hidden_size"], json["intermediate_size"], json["architectures"]
    products = {f"attention.self.{each}": (h, h) for each in ("query", "key", "value")}
    products |= {"attention.output.dense": (h, h), "intermediate.dense": (f, h), "output.dense": (h, f)}
    products = {f"encoder.layer.{i}.{name}": shape for i in range(4) for name, shape in products.items()}
    norms = ["embeddings.LayerNorm"]
    norms += [f"encoder.layer.{i}.{each}output.LayerNorm" for i in range(4) for each in ("attention.", "")]
    tables = {"word": json["vocab_size"], "position": json["max_position_embeddings"], "token_type": 2}
    found = {f"embeddings.{each}_embeddings.weight": (rows, h) for each, rows in tables.items()}
    if name != "BertForMaskedLM":
        products["pooler.dense"] = (h, h)
    found |= {f"{each}.weight": shape for each, shape in products.items()}
    found |= {f"{each}.bias": shape[:1] for each, shape in products.items()}
    found |= {f"{each}.{kind}": (h,) for each in norms for kind in ("weight", "bias")}
    found = {f"bert.{each}": shape for each, shape in found.items()}
    if name == "BertForSequenceClassification":
        return found | {"classifier.weight": (len(json["id2label"]), h), "classifier.bias": (len(json["id2label"]),)}
    if name == "BertForPreTraining":
        found |= {"cls.seq_relationship.weight": (2, h), "cls.seq_relationship.bias": (2,)}
    head = {"dense.weight": (h, h), "dense.bias": (h,), "LayerNorm.weight": (h,), "LayerNorm.bias": (h,)}
    found |= {f"cls.predictions.transform.{each}": shape for each, shape in head.items()}
    return found | {"cls.predictions.bias": (json["vocab_size"],)}


def make_folder(folder: pathlib.Path, name: str, **fields: Any) -> dict[str, np.ndarray]:
    """Writes a folder with random tensors; returns the tensors."""
    folder.mkdir(parents=True)
    described = {"architectures": [name], "model_type": ARCHITECTURES[name].model_type, **CONFIGS[name], **fields}
    (folder / "config.json").write_text(json.dumps(described))
    rng = np.random.default_rng(0)
    half = described.get("dtype", described.get("torch_dtype")) == "bfloat16"
    dtype = ml_dtypes.bfloat16 if half else np.float32
    tensors = {key: rng.normal(0, 0.1, shape).astype(dtype) for key, shape in shapes(described).items()}
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def on_eight(config: Config) -> Config:
    """On data=2 × pipe=2 × tensor=2 with two chunks."""
    mesh = {"mesh.data": 2, "mesh.pipe": 2, "mesh.tensor": 2}
    pipeline = {"pipeline.schedule": "interleaved_1f1b", "pipeline.num_chunks": 2, "pipeline.num_microbatches": 2}
    return replaced(config, mesh | pipeline)
