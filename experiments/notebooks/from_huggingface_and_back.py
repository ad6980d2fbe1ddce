# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # From Hugging Face and back
#
# A folder of Hugging Face's transformers becomes a run of fiddlex, trains on eight devices, generates text, and becomes
# a folder again. On a CPU the devices are made up; the program is the one that would run on real ones. Nothing is
# downloaded: we first write a small folder with random weights. A folder of published weights goes the same way.
#
# In Colab, or any environment without fiddlex, install a checkout first: `pip install -e '.[notebook]' safetensors`.
# Edit the `.py` beside this notebook; the tests run it.

# %%
import json
import pathlib
import tempfile

import jax
import numpy as np
import safetensors.numpy
import tokenizers

from fiddlex.cluster.mesh import request_devices
from fiddlex.config import Config
from fiddlex.config.overrides import replaced
from fiddlex.train import loop
from fiddlex.train.inference.sampling import SamplingConfig
from fiddlex.train.run.transfer.conversion import export_workdir, import_folder
from fiddlex.train.trainer import load_trainer

jax.config.update("jax_platforms", "cpu")
request_devices(8)

# %% [markdown]
# ## A folder
#
# It has a `config.json`, a `tokenizer.json` and `model.safetensors`: those of a Llama with four layers. The tokenizer
# is a byte-pair encoding that we train on a package of Python's standard library, which will be our data too.

# %%
parent = pathlib.Path(tempfile.mkdtemp())
folder = parent / "llama"
folder.mkdir()
package = pathlib.Path(json.__file__).parents[1] / "email"
texts = [path.read_text(encoding="utf-8") for path in sorted(package.glob("*.py"))]
tokenizer = tokenizers.ByteLevelBPETokenizer()
tokenizer.train_from_iterator(texts, vocab_size=512, show_progress=False)
tokenizer.save(str(folder / "tokenizer.json"))

described = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "float32",
    "pad_token_id": None,
}
(folder / "config.json").write_text(json.dumps(described))

# %% [markdown]
# A linear layer of PyTorch stores its weight as [outputs, inputs]. There are two heads of keys and values for four of
# queries, each 16 wide.

# %%
shapes = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (176, 64),
    "mlp.up_proj": (176, 64),
    "mlp.down_proj": (64, 176),
}
rng = np.random.default_rng(0)
tensors = {
    f"model.layers.{i}.{name}.weight": rng.normal(0, 0.05, shape) for i in range(4) for name, shape in shapes.items()
}
tensors |= {name: rng.normal(0, 0.05, (512, 64)) for name in ("model.embed_tokens.weight", "lm_head.weight")}
norms = [f"model.layers.{i}.{name}" for i in range(4) for name in ("input_layernorm", "post_attention_layernorm")]
tensors |= {f"{name}.weight": np.ones(64) for name in [*norms, "model.norm"]}
tensors = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

# %% [markdown]
# ## To a workdir
#
# `import_folder` is what `experiments/convert.py --source=hf:DIR --target=WORKDIR` calls. The second function changes
# the config that the workdir gets: here its data and its layout, data=2 × pipe=2 × tensor=2 with two chunks.


# %%
def changed(config: Config) -> Config:
    return replaced(
        config,
        {
            "mesh.data": 2,
            "mesh.pipe": 2,
            "mesh.tensor": 2,
            "pipeline.schedule": "interleaved_1f1b",
            "pipeline.num_chunks": 2,
            "pipeline.num_microbatches": 2,
            "data.source": f"text:{package}",
            "data.global_batch_size": 32,
            "optimizer.learning_rate": 3e-3,
            "optimizer.warmup_steps": 10,
            "train.num_steps": 40,
            "train.log_every": 20,
            "train.checkpoint_every": 40,
        },
    )


workdir = parent / "run"
config = import_folder(folder, workdir, changed)
model = config.model
print(f"{model.family}: {model.num_layers} layers, {model.kv_heads} heads of keys, {model.seq_len} positions")

# %% [markdown]
# The workdir evaluates at once. A model that knows nothing would have a loss of ln 512.

# %%
before = load_trainer(workdir).evaluate()
print(f"loss {before['eval_loss']:.3f}, ln 512 = {np.log(512):.3f}")

# %% [markdown]
# Back again, every tensor has the same bytes; none is missing and none is added.


# %%
def read(path: pathlib.Path) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(path / "model.safetensors")


export_workdir(workdir, parent / "unchanged", "")
unchanged = read(parent / "unchanged")
assert {name: x.tobytes() for name, x in unchanged.items()} == {name: x.tobytes() for name, x in tensors.items()}

# %% [markdown]
# ## Train, evaluate, generate
#
# `loop.train` is what `experiments/train.py` calls: it goes on in the workdir, from step 0.

# %%
loop.train(config, workdir)
trainer = load_trainer(workdir)
after = trainer.evaluate()
print(f"loss {before['eval_loss']:.3f} before, {after['eval_loss']:.3f} after {after['step']} steps")
assert after["eval_loss"] < before["eval_loss"] - 0.5

# %%
print("".join(trainer.generate("def ", 60, SamplingConfig(temperature=0.7))))

# %% [markdown]
# ## And back
#
# The folder has the trained weights, and of `config.json` every field that fiddlex does not know. Where transformers is
# installed, `AutoModelForCausalLM.from_pretrained` loads it.

# %%
back = parent / "trained"
step = export_workdir(workdir, back, "")
trained = read(back)
assert trained.keys() == tensors.keys()
assert json.loads((back / "config.json").read_text())["pad_token_id"] is None
moved = {name: np.linalg.norm(x - tensors[name]) / np.linalg.norm(tensors[name]) for name, x in trained.items()}
print(f"step {step}; how far each tensor moved, relative to its norm:")
for name in sorted(moved, key=lambda name: moved[name])[-5:]:
    print(f"{moved[name]:7.2f}  {name}")
assert min(moved.values()) > 0
