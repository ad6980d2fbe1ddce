"""Compares logits with those of Hugging Face's transformers, on random models, and takes the weights there and back.

    pip install transformers torch
    python third_party/huggingface/compare_logits.py

For each architecture it makes a small random model, saves it with `save_pretrained`, reads it in two layouts, on one
device and on data=2 × pipe=2 × tensor=2 with two chunks, and prints the largest difference of the logits relative to
the largest logit. Then it writes a folder, checks that every tensor has the same bytes, and that transformers loads it
and computes the same logits.
"""

import os
import pathlib
import tempfile

import jax
import numpy as np

jax.config.update("jax_num_cpu_devices", 8)
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import safetensors.numpy  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

from fiddlex.cluster.mesh import make_mesh  # noqa: E402
from fiddlex.config import Config  # noqa: E402
from fiddlex.config.overrides import replaced  # noqa: E402
from fiddlex.interop.folder import read_model  # noqa: E402
from fiddlex.interop.huggingface import read_weights, write_weights  # noqa: E402
from fiddlex.parallel.sharding import named  # noqa: E402
from fiddlex.train.inference.forward import make_logits  # noqa: E402
from fiddlex.train.step.program import Program  # noqa: E402

VOCABULARY, LENGTH = 257, 32
LAYOUTS = {
    "1 × 1 × 1": {},
    "2 × 2 × 2": {
        "mesh.data": 2,
        "mesh.pipe": 2,
        "mesh.tensor": 2,
        "pipeline.schedule": "interleaved_1f1b",
        "pipeline.num_chunks": 2,
        "pipeline.num_microbatches": 2,
    },
}


def models() -> dict[str, transformers.PreTrainedModel]:
    """A random model of each architecture."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": LENGTH,
    }
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    gpt2 = transformers.GPT2Config(n_embd=32, n_layer=4, n_head=4, vocab_size=VOCABULARY, n_positions=LENGTH)
    return {
        "GPT-2": transformers.GPT2LMHeadModel(gpt2),
        "Llama, rope_type llama3": transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**sizes, rope_parameters=llama3)
        ),
        "Llama, one head of keys": transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**sizes | {"num_key_value_heads": 1})
        ),
        "Mistral": transformers.MistralForCausalLM(transformers.MistralConfig(**sizes)),
        "Qwen3, tied": transformers.Qwen3ForCausalLM(
            transformers.Qwen3Config(**sizes, head_dim=10, tie_word_embeddings=True)
        ),
    }


def compare(model: transformers.PreTrainedModel, changes: dict[str, object]) -> float:
    """The largest difference of the logits relative to the largest logit; checks the way back."""
    with tempfile.TemporaryDirectory() as parent:
        folder, back = pathlib.Path(parent) / "hf", pathlib.Path(parent) / "back"
        model.save_pretrained(folder)
        config = replaced(replaced(Config(), {"model": read_model(folder)}), changes).validate()
        program = Program(config, make_mesh(config.mesh))
        layout = program.layout
        shardings = named(program.mesh, layout.master)
        weights = read_weights(folder, program.model, layout.shapes, shardings, layout.placement.layers)
        tokens = np.random.default_rng(0).integers(0, VOCABULARY, (LENGTH, LENGTH)).astype(np.int32)
        positions = np.arange(LENGTH, dtype=np.int32)  # another position of each row
        logits = make_logits(program.model, config, mesh=program.mesh, layout=layout)
        ours = np.asarray(logits(weights, tokens, positions))[:, :VOCABULARY]
        theirs = all_logits(model, tokens)[positions, positions]

        back.mkdir()
        (back / "config.json").write_bytes((folder / "config.json").read_bytes())
        write_weights(back, config, program.model, weights, layout.placement.rows, "float32")
        before, after = (safetensors.numpy.load_file(each / "model.safetensors") for each in (folder, back))
        assert {name: x.tobytes() for name, x in before.items()} == {name: x.tobytes() for name, x in after.items()}
        loaded = transformers.AutoModelForCausalLM.from_pretrained(back)
        np.testing.assert_array_equal(all_logits(loaded, tokens), all_logits(model, tokens))
        return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


@torch.no_grad()
def all_logits(model: transformers.PreTrainedModel, tokens: np.ndarray) -> np.ndarray:
    """Whole logits, float32 [row, position, vocabulary]."""
    logits: np.ndarray = model.eval()(torch.tensor(tokens).long()).logits.numpy()
    return logits


def main() -> None:
    """Prints a table, one line for each architecture."""
    torch.manual_seed(0)
    print("| model | " + " | ".join(LAYOUTS) + " |\n|---|" + "---:|" * len(LAYOUTS))
    for name, model in models().items():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        print(f"| {name} | " + " | ".join(f"{compare(model, changes):.1e}" for changes in LAYOUTS.values()) + " |")


if __name__ == "__main__":
    main()
