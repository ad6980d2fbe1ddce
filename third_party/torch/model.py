"""GPT-2 in plain PyTorch, whole or as a stage of a pipeline, with AdamW as fiddlex has it.

Modules have the names of transformers' GPT-2, in which a job's weights come. transformers stores kernels of products
as [inputs, outputs], `torch.nn.Linear` as [outputs, inputs].
"""

from collections.abc import Iterable

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from third_party.protocol import Job


class Layer(nn.Module):
    """A pre-LN layer with causal self-attention."""

    def __init__(self, job: Job):
        super().__init__()
        hidden, epsilon = job.model["hidden_size"], job.model["layer_norm_epsilon"]
        ffn = job.model["ffn_size"] or 4 * hidden
        self.num_heads = job.model["num_heads"]
        self.gelu = "tanh" if job.model["gelu"] == "tanh" else "none"
        self.ln_1, self.ln_2 = nn.LayerNorm(hidden, epsilon), nn.LayerNorm(hidden, epsilon)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(hidden, 3 * hidden), "c_proj": nn.Linear(hidden, hidden)})
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(hidden, ffn), "c_proj": nn.Linear(ffn, hidden)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps the residual stream [example, position, hidden] through the layer."""
        examples, length, hidden = x.shape
        heads = self.attn["c_attn"](self.ln_1(x)).view(examples, length, 3, self.num_heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each [example, head, position, width]
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn["c_proj"](mixed.transpose(1, 2).reshape(examples, length, hidden))
        inner = functional.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate=self.gelu)
        return x + self.mlp["c_proj"](inner)


class Stage(nn.Module):
    """Some layers of a GPT-2, with the embedding before the first and the head after the last.

    Args:
      job: the job, whose weights the stage takes.
      layers: the numbers of its layers.
    """

    def __init__(self, job: Job, layers: range):
        super().__init__()
        model = job.model
        self.is_first, self.is_last = layers.start == 0, layers.stop == model["num_layers"]
        self.h = nn.ModuleDict({str(number): Layer(job) for number in layers})
        if self.is_first or self.is_last:
            self.wte = nn.Embedding(model["vocab_size"], model["hidden_size"])
        if self.is_first:
            self.wpe = nn.Embedding(model["seq_len"], model["hidden_size"])
        if self.is_last:
            self.ln_f = nn.LayerNorm(model["hidden_size"], model["layer_norm_epsilon"])
        load(self, job.weights())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps tokens or the residual stream to the residual stream or logits."""
        if self.is_first:
            x = self.wte(x) + self.wpe.weight[: x.shape[1]]
        for layer in self.h.values():
            x = layer(x)
        return functional.linear(self.ln_f(x), self.wte.weight) if self.is_last else x


def load(module: nn.Module, weights: dict[str, np.ndarray], *, prefix: str = "transformer.") -> None:
    """Copies weights of transformers' names to the parameters of these names, turning kernels of products."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            weight = weights[prefix + name]
            is_kernel = weight.ndim == 2 and not name.endswith(("wte.weight", "wpe.weight"))
            parameter.copy_(torch.from_numpy(np.ascontiguousarray(weight.T) if is_kernel else weight))


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy of the next token."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def adamw(job: Job, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW whose weight decay applies to matrices, as fiddlex's does."""
    settings, parameters = job.config["optimizer"], list(parameters)
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings["weight_decay"]},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = settings["beta1"], settings["beta2"]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=job.learning_rate(0), betas=betas, eps=settings["epsilon"], fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the learning rate of all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def batches(job: Job, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The tokens and targets of each batch, int64, on a device."""
    tokens, targets = (torch.from_numpy(values).long().to(device) for values in job.batches())
    return list(zip(tokens, targets, strict=True))
