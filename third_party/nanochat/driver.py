"""A driver of nanochat (https://github.com/karpathy/nanochat): the model and the optimizer of a clone.

    PYTHON -m third_party.nanochat.driver JOB.json

nanochat's network is not a GPT-2: it has rotary positions, RMSNorm without weights, squared ReLU, untied and additional
embeddings, and Muon trains its matrices. So it has its own initial weights and its losses are not compared; only the
numbers of layers, heads, channels and tokens are the job's. All layers attend to the whole sequence.

Options of the job: `mode` is `eager` or `compile`; `microbatches` as for `third_party.torch.driver`. nanochat's
optimizer is compiled in both modes, so both need a C++ compiler.
"""

import os
import pathlib
import sys

import torch

from third_party.protocol import Job, Training, serve
from third_party.torch.device import peak_bytes, prepare, wait
from third_party.torch.driver import require_compiler
from third_party.torch.model import batches


def start(job: Job) -> Training:
    """Prepares nanochat's model with weights of its own."""
    require_compiler()
    if not (pathlib.Path(job.clone) / "nanochat" / "gpt.py").exists():
        sys.exit(f"{job.clone} has no nanochat/gpt.py: --clone must name a clone of nanochat.")
    os.environ["NANOCHAT_DTYPE"] = job.dtype  # read when nanochat is imported
    sys.path.insert(0, job.clone)
    from nanochat.gpt import GPT, GPTConfig

    device = prepare(job)
    torch.manual_seed(0)
    sizes, heads = job.model, job.model["num_heads"]
    config = GPTConfig(
        sequence_len=sizes["seq_len"],
        vocab_size=sizes["vocab_size"],
        n_layer=sizes["num_layers"],
        n_head=heads,
        n_kv_head=heads,
        n_embd=sizes["hidden_size"],
        window_pattern="L",
    )
    with device:
        model = GPT(config)
    model.init_weights()
    optimizer, data, done = model.setup_optimizer(), batches(job, device), 0
    num_microbatches = int(job.options.get("microbatches", job.num_microbatches))
    score = torch.compile(model, dynamic=False) if job.options["mode"] == "compile" else model

    def train(steps: int) -> list[float]:
        nonlocal done
        losses = []  # on the device, so that steps need not wait for one another
        for _ in range(steps):
            total = torch.zeros((), device=device)
            parts = (part.chunk(num_microbatches) for part in data[done % len(data)])
            for tokens, targets in zip(*parts, strict=True):
                loss = score(tokens, targets) / num_microbatches
                loss.backward()
                total += loss.detach()
            optimizer.step()
            model.zero_grad(set_to_none=True)
            losses.append(total)
            done += 1
        wait(job)
        return torch.stack(losses).tolist()

    return Training(
        train,
        f"nanochat, torch {torch.__version__}",
        differs="another network, weights and optimizer",
        peak_bytes=lambda: peak_bytes(job),
    )


if __name__ == "__main__":
    serve(start)
