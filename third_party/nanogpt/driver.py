"""A driver of nanoGPT (https://github.com/karpathy/nanoGPT): the model and the optimizer of a clone's `model.py`.

    PYTHON -m third_party.nanogpt.driver JOB.json

Options of the job: `mode` is `eager` or `compile`; `microbatches` as for `third_party.torch.driver`. Biases are on and
the vocabulary has the config's size. nanoGPT's GELU is the exact one, and its AdamW has an epsilon of 1e-8 and takes
the fused kernel on GPUs only. On GPUs its attention is a flash kernel, and in bfloat16 `torch.autocast` runs its
products in bfloat16. All of this is as its own `train.py` has it.
"""

import importlib.util
import pathlib
import sys
from types import ModuleType

import torch

from third_party.protocol import Job, Training, serve
from third_party.torch.device import peak_bytes, prepare
from third_party.torch.driver import require_compiler, trainer
from third_party.torch.model import load


def start(job: Job) -> Training:
    """Prepares nanoGPT's model with the job's weights."""
    compiled = job.options["mode"] == "compile"
    if compiled:
        require_compiler()
    require_same(job)
    device = prepare(job)
    sizes, settings = job.model, job.config["optimizer"]
    nanogpt = module(pathlib.Path(job.clone) / "model.py")
    names = {"n_layer": "num_layers", "n_head": "num_heads", "n_embd": "hidden_size", "block_size": "seq_len"}
    fields = {theirs: sizes[ours] for theirs, ours in names.items()}
    model = nanogpt.GPT(nanogpt.GPTConfig(**fields, vocab_size=sizes["vocab_size"], dropout=0.0, bias=True))
    load(model, job.weights(), prefix="")
    model.to(device)
    betas = settings["beta1"], settings["beta2"]
    optimizer = model.configure_optimizers(settings["weight_decay"], job.learning_rate(0), betas, job.device)
    train = trainer(job, lambda tokens, targets: model(tokens, targets)[1], optimizer, compiled=compiled)
    return Training(train, f"nanoGPT, torch {torch.__version__}", peak_bytes=lambda: peak_bytes(job))


def require_same(job: Job) -> None:
    """Ends the program when nanoGPT cannot compute the job's model."""
    fixed = {
        "model.gelu": ("erf", job.model["gelu"]),
        "model.layer_norm_epsilon": (1e-5, job.model["layer_norm_epsilon"]),
        "model.ffn_size": (0, job.model["ffn_size"]),
        "optimizer.epsilon": (1e-8, job.config["optimizer"]["epsilon"]),
    }
    for name, (theirs, ours) in fixed.items():
        if theirs != ours:
            sys.exit(f"nanoGPT has {name}={theirs} alone, and the config has {ours}. Set --config.{name}={theirs}.")


def module(path: pathlib.Path) -> ModuleType:
    """The module in a file.

    Raises:
      SystemExit: when there is no such file.
    """
    if not path.exists():
        raise SystemExit(f"{path} is not there: --clone must name a clone of nanoGPT.")
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made
    spec.loader.exec_module(made)
    return made


if __name__ == "__main__":
    serve(start)
