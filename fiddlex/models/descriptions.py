"""The descriptions of the families; `gpt.py`, `llama.py` and `bert.py` compute them."""

import dataclasses
import functools
import math

from fiddlex.config import Config, ModelConfig
from fiddlex.models.spec import (
    Activation,
    Attention,
    Branch,
    Network,
    Norm,
    Parameter,
    Parameters,
    Product,
    Residual,
    linear,
    norm,
    table,
)
from fiddlex.models.task_sizes import task_of

NUM_TOKEN_TYPES = 2  # in BERT: the first and the second text of a pair


def gpt(config: Config) -> Network:
    """GPT-2 (Radford et al. 2019): a pre-LN decoder with learned positions."""
    model = config.model
    return Network(
        task=task_of(config),
        embedding=_embedding(model),
        layer=_layer(model),
        head=_decoder_head(model, norm(model.hidden_size)),
        num_layers=model.num_layers,
        hidden=model.hidden_size,
        branches=_branches(model, causal=True),
        scoring=(Product(model.hidden_size, model.vocab_size, "vocab", "scored"),),
    )


def llama(config: Config) -> Network:
    """A decoder as in Llama (Touvron et al. 2023, arXiv:2302.13971, section 2.2), with options of its descendants.

    RMSNorm before each branch (Zhang & Sennrich, NeurIPS 2019), rotary positions (Su et al. 2021, arXiv:2104.09864), a
    gated MLP with SiLU (Shazeer 2020, arXiv:2002.05202) and no biases; heads of keys and values that several heads of
    queries share (Ainslie et al., EMNLP 2023), RMSNorm of queries and keys (Qwen3), and biases of queries, keys and
    values (Qwen2). Where there are more tensor ranks than heads of keys and values, each rank has the whole kernels of
    keys and values and computes the one head that its queries share with those of other ranks.
    """
    model, hidden, units, size = config.model, config.model.hidden_size, config.model.mlp_size, config.model.head_size
    heads, kv_heads, replicas = model.num_heads, model.kv_heads, max(config.mesh.tensor // model.kv_heads, 1)
    matrix = functools.partial(linear, num_inputs=1, std=model.init_std, bias=False)
    out = functools.partial(linear, std=residual_std(model), bias=False)
    projection = functools.partial(matrix, bias=model.qkv_bias)
    kv = {
        name: dataclasses.replace(parameter, partial=("tensor",) if replicas > 1 else None)
        for name, parameter in projection(
            (hidden, kv_heads, size), ("hidden", "heads" if replicas == 1 else None, None)
        ).items()
    }
    head_scale = {"scale": Parameter((size,), (None,), value=1.0, partial=("tensor",))}
    up = matrix((hidden, units), ("hidden", "mlp"))
    layer = {
        "attention_norm": norm(hidden, bias=False),
        "attention": {
            "q": projection((hidden, heads, size), ("hidden", "heads", None)),
            "k": kv,
            "v": kv,
            "out": out((heads, size, hidden), ("heads", None, "hidden"), num_inputs=2),
            **({"q_norm": head_scale, "k_norm": head_scale} if model.qk_norm else {}),
        },
        "mlp_norm": norm(hidden, bias=False),
        "mlp": {"gate": up, "up": up, "down": out((units, hidden), ("mlp", "hidden"), num_inputs=1)},
    }
    attention = Attention(heads, size, causal=True, kv_heads=kv_heads, kv_replicas=replicas)
    kv_product = Product(hidden, kv_heads * size, "outputs", shares_input=True, replicas=replicas)
    norms = (Norm(heads, size), Norm(kv_heads, size, replicas)) if model.qk_norm else ()
    into = (Product(hidden, attention.width, "outputs", made_by="norms"), kv_product, kv_product, *norms)
    up_product = Product(hidden, units, "outputs", made_by="norms")
    into_mlp = (
        up_product,
        dataclasses.replace(up_product, shares_input=True, made_by=""),
        Activation(units, num_inputs=2),
    )
    return Network(
        task=task_of(config),
        embedding={"tokens": table(model.vocab_size, hidden, "vocab", std=model.init_std)},
        layer=layer,
        head=_decoder_head(model, norm(hidden, bias=False)),
        num_layers=model.num_layers,
        hidden=hidden,
        branches=(
            (Norm(), *into, attention, Product(attention.width, hidden, "inputs"), Residual()),
            (Norm(), *into_mlp, Product(units, hidden, "inputs", made_by="gelu"), Residual()),
        ),
        scoring=(Product(hidden, model.vocab_size, "vocab", "scored"),),
    )


def bert(config: Config) -> Network:
    """BERT (Devlin et al., NAACL 2019), post-LN as published or pre-LN, with one head for each part of its loss."""
    model, task, hidden = config.model, task_of(config), config.model.hidden_size
    head: Parameters = {} if model.post_norm else {"norm": norm(hidden)}
    square = linear((hidden, hidden), ("hidden", None), num_inputs=1, std=model.init_std)
    scoring: tuple[Product, ...] = ()
    if task.num_scored:
        bias = Parameter((model.vocab_size,), ("vocab",))
        head["masked"] = {"transform": square, "norm": norm(hidden), "bias": bias}
        scoring += (
            Product(hidden, hidden, positions="scored"),
            Product(hidden, model.vocab_size, "vocab", "scored"),
        )
    if task.num_outputs:
        outputs, axes = (hidden, task.num_outputs), ("hidden", "classes")
        if task.num_outputs == 1:
            # No bias: it would cancel, since the score is compared with the scores of other sequences.
            last: Parameters = {"score": Parameter(outputs, axes, model.init_std, decays=True)}
        else:
            last = {"classifier": linear(outputs, axes, num_inputs=1, std=model.init_std)}
        head["label"] = {"pooler": square, **last}
        scoring += (Product(hidden, hidden, positions="first"), Product(*outputs, positions="first"))
    return Network(
        task=task,
        embedding=_embedding(model, num_token_types=NUM_TOKEN_TYPES),
        layer=_layer(model),
        head=head,
        num_layers=model.num_layers,
        hidden=hidden,
        branches=_branches(model, causal=False),
        scoring=scoring,
    )


def _decoder_head(model: ModelConfig, last_norm: Parameters) -> Parameters:
    """The last norm, and the table that scores the vocabulary where that of the embedding does not."""
    own = (
        {}
        if model.tied_embeddings
        else {"output": table(model.vocab_size, model.hidden_size, "vocab", std=model.init_std)}
    )
    return {"norm": last_norm, **own}


def residual_std(model: ModelConfig) -> float:
    """The standard deviation of the kernels that write into the residual stream.

    With pre-LN it is scaled by 1/√(2·layers) (GPT-2). With post-LN, which normalises sums, it is as elsewhere (BERT).
    """
    return model.init_std if model.post_norm else model.init_std / math.sqrt(2 * model.num_layers)


def _embedding(model: ModelConfig, *, num_token_types: int = 0) -> Parameters:
    hidden, std = model.hidden_size, model.init_std
    parameters: Parameters = {
        "tokens": table(model.vocab_size, hidden, "vocab", std=std),
        "positions": table(model.seq_len, hidden, "positions", std=std),
    }
    if num_token_types:
        parameters["token_types"] = table(num_token_types, hidden, "token_types", std=std)
    return parameters | ({"norm": norm(hidden)} if model.post_norm else {})


def _layer(model: ModelConfig) -> Parameters:
    hidden, heads, size, units = model.hidden_size, model.num_heads, model.head_size, model.mlp_size
    std = residual_std(model)
    qkv_axes, out_axes = ("hidden", None, "heads", None), ("heads", None, "hidden")
    return {
        "attention_norm": norm(hidden),
        "attention": {
            "qkv": linear((hidden, 3, heads, size), qkv_axes, num_inputs=1, std=model.init_std, separate=1),
            "out": linear((heads, size, hidden), out_axes, num_inputs=2, std=std),
        },
        "mlp_norm": norm(hidden),
        "mlp": {
            "up": linear((hidden, units), ("hidden", "mlp"), num_inputs=1, std=model.init_std),
            "down": linear((units, hidden), ("mlp", "hidden"), num_inputs=1, std=std),
        },
    }


def _branches(model: ModelConfig, *, causal: bool) -> tuple[Branch, ...]:
    hidden, units = model.hidden_size, model.mlp_size
    attention = Attention(model.num_heads, model.head_size, causal)
    made_by = "" if model.post_norm else "norms"  # in post-LN the norm before attention is in the layer before
    into = Product(hidden, 3 * attention.width, "outputs", made_by=made_by)
    out = Product(attention.width, hidden, "inputs")
    up = Product(hidden, units, "outputs", made_by="norms")
    down = Product(units, hidden, "inputs", made_by="gelu")
    return (Norm(), into, attention, out, Residual()), (Norm(), up, Activation(units), down, Residual())
