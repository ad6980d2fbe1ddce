"""The numbers of parameters and floating-point operations of a model, from its config only; the planner uses them.

The functions sum over the network's description (`fiddlex.models.spec`). Each docstring gives the sum for GPT and BERT
in closed form, in the letters of Narayanan et al. 2021 (SC'21, arXiv:2104.04473), section 5.1 and appendix: B batch, s
sequence, l layers, h hidden size, V vocabulary; and f, the MLP's width, which is 4h in the paper. Invariant: all
numbers are those of the config's model, whatever the mesh; they leave out rows that only pad the vocabulary.
"""

from fiddlex.config import Config, ModelConfig
from fiddlex.models.registry import network_of
from fiddlex.models.spec import Network, Product, leaves


def num_parameters(config: Config) -> int:
    """The number of trained weights, exactly.

    A GPT has (V + s)h + l(4h² + 4h + 2hf + f + h + 4h) + 2h: the table, tied to the head, and learned positions; in
    each layer the projections of attention and the MLP, all with biases, and two LayerNorms; and the last LayerNorm.
    BERT also has two token types, 2h; the head of masked tokens, h² + 3h + V; and the head of labels, h² + h for the
    pooler and hc + c for c classes, or h to score a choice.
    """
    network = network_of(config)
    layer = sum(each.size for each in leaves(network.layer))
    return network.num_layers * layer + sum(each.size for each in network.outer)


def paper_num_parameters(config: ModelConfig) -> int:
    """P = 12lh²(1 + 13/(12h) + (V + s)/(12lh)), section 5.1.

    With f = 4h, P is `num_parameters` of a GPT without the final LayerNorm's 2h. The formula ignores `ffn_size`.
    """
    h, l = config.hidden_size, config.num_layers  # noqa: E741
    return 12 * l * h**2 + 13 * l * h + (config.vocab_size + config.seq_len) * h


def model_flops(config: Config) -> float:
    """The operations that a step needs: forward and backward pass over the global batch, without recomputation.

    They are three times those of the forward pass, since the backward pass takes twice as many. Only matrix products
    count, with two operations for each multiply-add. In the forward pass the layers take 2Bsl(4h² + 2hf + 2sh). The
    head takes, where an example has P masked tokens:

    - GPT: 2BshV. With f = 4h the whole step takes 72Bslh²(1 + s/(6h) + V/(12lh)): section 5.1 and appendix, without the
      recomputation. As in the paper, attention counts the whole s × s square, even where a causal kernel skips half of
      it.
    - BERT's masked tokens: 2BP(h² + hV), the transform and the table, only at the masked positions, as many as an
      example has room for.
    - BERT's labels: 2B(h² + hc) for the pooler and c classes, two for sentence pairs. In multiple choice an example has
      k sequences, so that the head takes 2Bk(h² + h) and everything before it k times as much.
    """
    network = network_of(config)
    return 3.0 * config.data.global_batch_size * (_layers_flops(network, config) + _head_flops(network))


def hardware_flops(config: Config) -> float:
    """The operations that a step performs with `pipeline.recompute=full`.

    They are `model_flops` plus the layers' forward pass once more; the step does not recompute the head. A GPT with
    f = 4h takes 96Bslh²(1 + s/(6h) + V/(16lh)): section 5.1 and appendix.
    """
    return model_flops(config) + config.data.global_batch_size * _layers_flops(network_of(config), config)


def _layers_flops(network: Network, config: Config) -> int:
    """Operations of the layers' forward pass over one example."""
    weights = sum(each.inputs * each.outputs for each in network.products)  # a multiply-add for each weight and token
    attention = 2 * config.model.seq_len * network.attention.width  # one each for the scores and for the values
    inner = sum(each.flops for operation in network.operations for each in operation.inner)
    of_sequence = 2 * config.model.seq_len * (weights + attention) + inner
    return network.task.num_sequences * network.num_layers * of_sequence


def _head_flops(network: Network) -> int:
    """Operations of the head's forward pass over one example."""
    task = network.task
    number = {"scored": task.num_scored, "first": task.num_sequences}
    return sum(
        2 * number[each.positions] * each.inputs * each.outputs
        if isinstance(each, Product)
        else task.num_sequences * each.flops
        for each in network.scoring
    )
