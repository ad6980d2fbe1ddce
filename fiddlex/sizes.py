"""Parameters and floating-point operations of a model, from its config alone; what the planner reckons with.

Formulas of Narayanan et al. 2021 (SC'21, arXiv:2104.04473), section 5.1 and appendix, in its letters: B batch, s
sequence, l layers, h hidden size, V vocabulary; and f, the MLP's width, which the paper takes to be 4h. Invariant: all
of it counts the model that the config asks for, whatever the mesh; rows that only pad the vocabulary are left out.
This file imports no jax.
"""

from fiddlex.config import DataConfig, ModelConfig


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


def max_masked(seq_len: int, mask_fraction: float) -> int:
    """The most tokens masked in one example, the same for all of a run: the share of `seq_len`, at least 1."""
    return max(1, round(mask_fraction * seq_len))


def model_flops(config: ModelConfig, batch_size: int, data: DataConfig | None = None) -> float:
    """Operations that a step needs: forward and backward pass over `batch_size` examples, nothing recomputed.

    Three times the forward pass's, of which the backward pass takes twice as many. Matrix products only, two operations
    for each multiply-add: 2Bsl(4h² + 2hf + 2sh) in the layers, and in the head, where an example has P masked tokens:

    - GPT: 2BshV. With f = 4h all comes to 72Bslh²(1 + s/(6h) + V/(12lh)): section 5.1 and appendix, less the
      recomputation. As in the paper, attention is counted over the whole s × s square, also where a causal kernel
      skips half of it.
    - BERT's masked tokens: 2BP(h² + hV), the transform and the table, at the masked positions alone, as many as there
      is room for.
    - BERT's labels: 2B(h² + hc) for the pooler and c classes, two of sentence pairs; in multiple choice, whose
      examples are of k sequences each, 2Bk(h² + h), and everything before that is k-fold.

    Args:
      config: the model.
      batch_size: examples, B.
      data: that says how many tokens are masked, and how many classes or choices there are; None: the defaults.
    """
    return 3.0 * (_layers_forward_flops(config, batch_size, data) + _head_forward_flops(config, batch_size, data))


def hardware_flops(config: ModelConfig, batch_size: int, data: DataConfig | None = None) -> float:
    """Operations that a step performs with `pipeline.recompute=full`: `model_flops` and the layers' forward once more.

    Of a GPT with f = 4h, 96Bslh²(1 + s/(6h) + V/(16lh)): section 5.1 and appendix. The head is not recomputed. Counts
    as `model_flops` does.

    Args:
      config: the model.
      batch_size: examples, B.
      data: as for `model_flops`.
    """
    return model_flops(config, batch_size, data) + _layers_forward_flops(config, batch_size, data)


def _layers_forward_flops(config: ModelConfig, batch_size: int, data: DataConfig | None) -> int:
    h, s = config.hidden_size, config.seq_len
    weights = 4 * h**2 + 2 * h * config.mlp_size  # a multiply-add for each weight and token
    attention = 2 * s * h  # and, against every position, one each for the scores and for the values
    return 2 * batch_size * _rows(config, data) * s * config.num_layers * (weights + attention)


def _head_forward_flops(config: ModelConfig, batch_size: int, data: DataConfig | None) -> int:
    h, data = config.hidden_size, data or DataConfig()
    total = 0
    if config.family == "gpt":
        total += config.seq_len * h * config.vocab_size
    if config.task.startswith("mlm"):
        total += max_masked(config.seq_len, data.mask_fraction) * (h**2 + h * config.vocab_size)
    classes = {"mlm_nsp": 2, "mlm_sop": 2, "classification": len(data.classes), "multiple_choice": 1}.get(config.task)
    if classes is not None:
        total += _rows(config, data) * (h**2 + h * classes)
    return 2 * batch_size * total


def _rows(config: ModelConfig, data: DataConfig | None) -> int:
    """Sequences in an example."""
    return (data or DataConfig()).num_choices if config.task == "multiple_choice" else 1
