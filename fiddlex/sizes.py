"""Parameters and floating-point operations of a model, from its config alone; what the planner reckons with.

Formulas of Narayanan et al. 2021 (SC'21, arXiv:2104.04473), section 5.1 and appendix, in its letters: B batch, s
sequence, l layers, h hidden size, V vocabulary; and f, the MLP's width, which the paper takes to be 4h. Invariant: all
of it counts the model that the config asks for, whatever the mesh; rows that only pad the vocabulary are left out.
This file imports no jax.
"""

from fiddlex.config import ModelConfig


def num_parameters(config: ModelConfig, num_classes: int = 0) -> int:
    """Trained numbers of our models, exactly.

    (V + s)h + l(4h² + 4h + 2hf + f + h + 4h) + 2h: the table, tied to the head, and learned positions; in each layer
    the projections of attention, the MLP, all with biases, and two LayerNorms; and one LayerNorm more, after the layers
    or, in post-LN, after the embedding. In BERT also two token types, 2h; the head of masked tokens, h² + 3h + V; and
    that of labels, h² + h for the pooler and hc + c for c classes, or h to score a choice.

    Args:
      config: the model.
      num_classes: of classification.
    """
    h, f = config.hidden_size, config.mlp_size
    attention = h * 3 * h + 3 * h + h * h + h
    mlp = h * f + f + f * h + h
    norm = 2 * h
    total = (config.vocab_size + config.seq_len) * h + config.num_layers * (attention + mlp + 2 * norm) + norm
    if config.family == "bert":
        total += 2 * h
    if config.task.startswith("mlm"):
        total += h * h + h + norm + config.vocab_size
    classes = {"mlm_nsp": 2, "mlm_sop": 2, "classification": num_classes}.get(config.task, 0)
    if classes or config.task == "multiple_choice":
        total += h * h + h + (h * classes + classes or h)
    return total


def paper_num_parameters(config: ModelConfig) -> int:
    """P = 12lh²(1 + 13/(12h) + (V + s)/(12lh)), section 5.1.

    With f = 4h that is `num_parameters` without the final LayerNorm's 2h. `ffn_size` plays no part in it.
    """
    h, l = config.hidden_size, config.num_layers  # noqa: E741
    return 12 * l * h**2 + 13 * l * h + (config.vocab_size + config.seq_len) * h


def model_flops(config: ModelConfig, batch_size: int) -> float:
    """Operations that a step of a GPT needs: forward and backward pass over `batch_size` examples, nothing recomputed.

    With f = 4h, 72Bslh²(1 + s/(6h) + V/(12lh)): section 5.1 and appendix, less the recomputation. Matrix products only,
    two operations for each multiply-add; the backward pass takes twice the forward's. As in the paper, attention is
    counted over the whole s × s square, also where a causal kernel skips half of it.

    Args:
      config: the model.
      batch_size: examples, B.
    """
    return 3.0 * (_layers_forward_flops(config, batch_size) + _head_forward_flops(config, batch_size))


def hardware_flops(config: ModelConfig, batch_size: int) -> float:
    """Operations that a step performs with `pipeline.recompute=full`: `model_flops` and the layers' forward once more.

    With f = 4h, 96Bslh²(1 + s/(6h) + V/(16lh)): section 5.1 and appendix. The head is not recomputed. Counts as
    `model_flops` does.

    Args:
      config: the model.
      batch_size: examples, B.
    """
    return model_flops(config, batch_size) + _layers_forward_flops(config, batch_size)


def _layers_forward_flops(config: ModelConfig, batch_size: int) -> int:
    h, s = config.hidden_size, config.seq_len
    weights = 4 * h**2 + 2 * h * config.mlp_size  # a multiply-add for each weight and token
    attention = 2 * s * h  # and, against every position, one each for the scores and for the values
    return 2 * batch_size * s * config.num_layers * (weights + attention)


def _head_forward_flops(config: ModelConfig, batch_size: int) -> int:
    return 2 * batch_size * config.seq_len * config.hidden_size * config.vocab_size
