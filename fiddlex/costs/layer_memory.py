"""The memory of the passes through one layer, and through embedding and head, on one device.

The functions sum over the operations of `fiddlex.models.spec`: the activations that a layer saves for its backward pass
are those that its operations save (`fiddlex.models.operators`). Korthikanti et al., MLSys 2023, section 4, count those
of another model in the same way. The letters are those of `fiddlex.models.layers`: B sequences of a microbatch, S
positions, T a tensor rank's part of the positions under sequence parallelism (else S), H hidden size, N this tensor
rank's heads, A the joint width of these heads, V this device's slice of the vocabulary.
"""

import dataclasses
import itertools
from collections.abc import Sequence

from fiddlex.config import Config
from fiddlex.config.values.recompute import FULL
from fiddlex.config.values.stash import SAME
from fiddlex.costs.backend import Backend
from fiddlex.costs.saved import Saved
from fiddlex.hardware.flash import BLOCKED, SPLASH, block_length
from fiddlex.models.registry import network_of
from fiddlex.models.spec import MASK_ROW, Activation, Attention, Branch, Norm, Operation, Product, Residual
from fiddlex.models.task_sizes import task_of

FLOAT32, WORD = 4, 4  # bytes of an element; words are those of the random generator
ITEMSIZES = {"float32": FLOAT32, "bfloat16": 2, "float16": 2}


def num_sequences(config: Config) -> int:
    """Sequences in a microbatch, B."""
    return config.microbatch_size * task_of(config).num_sequences


@dataclasses.dataclass(frozen=True)
class LayerMemory:
    """The memory that one layer's passes take; sizes are in elements unless a line says bytes."""

    backend: Backend
    recompute: frozenset[str]  # the parts that the backward pass makes again (`PipelineConfig.recomputed`)
    branches: Sequence[Branch]
    tensor: int  # number of tensor ranks
    # parts of the sequence, of which a column-parallel product saves only the rank's own; 1: it saves the whole
    parts: int
    itemsize: int  # bytes of an element in the compute dtype
    operand: int  # bytes of an element of an array that only products read
    tokens: int  # positions of a microbatch, B·S
    seq_len: int  # S
    hidden: int  # width of the residual stream, H
    residual: int  # the residual stream on a device, B·T·H
    scores: int  # attention's scores, B·N·S·S
    block_scores: int  # the scores of a block of queries, as the kernel blocked computes them
    statistics: int  # one number for each row of the scores, B·N·S
    head_size: int
    by_head: int  # queries, keys, values and the result of attention, each head padded as splash reads it
    dropout: bool
    kernel: str  # the fused kernel of attention, which saves no scores (`FlashKernel.name`); empty: none
    encodes: bool  # whether the stash holds activations in 8 bits (`pipeline.stash_dtype`)

    @classmethod
    def of(cls, config: Config, backend: Backend) -> "LayerMemory":
        model, tensor, network = config.model, config.mesh.tensor, network_of(config)
        tokens, itemsize = num_sequences(config) * model.seq_len, ITEMSIZES[model.dtype]
        attention = network.attention
        statistics = tokens * attention.heads // tensor
        local = tokens * (attention.width + attention.kv_width) // tensor // attention.head_size
        return cls(
            backend=backend,
            recompute=config.pipeline.recomputed,
            branches=network.branches,
            tensor=tensor,
            parts=tensor if config.mesh.collective_matmul else 1,
            itemsize=itemsize,
            operand=min(itemsize, 2) if backend.rounds_products else itemsize,
            tokens=tokens,
            seq_len=model.seq_len,
            hidden=network.hidden,
            residual=tokens * network.hidden // (tensor if config.mesh.sequence_parallel else 1),
            scores=statistics * model.seq_len,
            block_scores=statistics * block_length(model.seq_len),
            statistics=statistics,
            head_size=attention.head_size,
            by_head=2 * local * backend.in_lanes(attention.head_size),
            dropout=model.dropout > 0,
            kernel=backend.flash_kernel(model).name,
            encodes=config.pipeline.stash_dtype != SAME,
        )

    def stash(self) -> int:
        """Bytes that a forward pass saves for its backward pass: the layer's input alone if it recomputes all."""
        if self._again:
            return self._input
        others = sum(map(self._masks, self.branches)) + self._rest_inside() * self._saves_inside
        return sum(each.encoded if self.encodes else each.bytes for each in self._activations()) + others

    def encoded(self) -> tuple[int, int]:
        """Elements that a forward pass encodes for the stash: of products' inputs, and of other activations."""
        if self._again or not self.encodes:
            return 0, 0
        encoded = [each for each in self._activations() if not each.is_input]
        inputs = sum(each.elements for each in encoded if each.of_product)
        return inputs, sum(each.elements for each in encoded) - inputs

    def _activations(self) -> list[Saved]:
        """The activations that a forward pass saves, unless the backward pass runs the whole layer again."""
        saved = [each for branch in self.branches for each in self._saved(branch)]
        return saved + self._saved_inside() * self._saves_inside

    @property
    def _saves_inside(self) -> bool:
        """Whether the inside of attention saves anything; a fused kernel does even if it recomputes its inside."""
        return bool(self.kernel) or "attention" not in self.recompute

    @property
    def _again(self) -> bool:
        """Whether the backward pass runs the whole layer again."""
        return FULL in self.recompute

    @property
    def _input(self) -> int:
        """Bytes of the layer's input; in post-LN, the second norm saves as many, of the sum before it."""
        return self.residual * self.itemsize

    def _saved(self, branch: Sequence[Operation]) -> list[Saved]:
        """The activations that operations of a branch save; of attention, without those inside it."""
        # What attention reads and gives is read by products alone, except where splash reads it.
        in_attention, saved = self.itemsize if self.kernel == SPLASH else self.operand, list[Saved]()
        for before, operation in itertools.pairwise((None, *branch)):
            match operation:
                case Norm():
                    elements = self._local(operation.width) or self.residual
                    saved.append(Saved(elements, self.head_size if operation.width else self.hidden, self.itemsize))
                case Product() if not operation.shares_input and operation.made_by not in self.recompute:
                    elements, width, itemsize = self._inputs(operation), operation.inputs, self.operand
                    if isinstance(before, Attention):
                        width, itemsize = self._last_of_heads(width), in_attention
                    elif operation.split == "inputs":
                        width //= self.tensor
                    saved.append(Saved(elements, width, itemsize, of_product=True))
                case Attention():
                    widths = operation.width, operation.kv_width, operation.kv_width
                    saved += [Saved(self._local(w), self._last_of_heads(w), in_attention) for w in widths]
                case Activation():
                    elements = self._local(operation.units)
                    saved += operation.num_inputs * [Saved(elements, operation.units // self.tensor, self.itemsize)]
            if operation is self._reader:
                saved[-1] = saved[-1]._replace(is_input=True)
        return saved

    def _last_of_heads(self, width: int) -> int:
        """The last dimension of an array of heads of a joint width: of one head, or for splash of all on this rank."""
        return width // self.tensor if self.kernel == SPLASH else self.head_size

    @property
    def _reader(self) -> Operation:
        """The operation that saves the layer's input: the first norm, or in post-LN the first product."""
        product = next(each for each in self.branches[0] if isinstance(each, Product))
        return self.branches[0][0] if product.made_by else product

    def _masks(self, branch: Sequence[Operation]) -> int:
        """Bytes of the masks of a branch's dropout, without that inside attention."""
        return sum(self._mask(self.residual) for each in branch if isinstance(each, Residual))

    def _bytes(self, branch: Sequence[Operation]) -> int:
        """Bytes that operations of a branch save, as the forward pass makes them; without those inside attention."""
        return sum(each.bytes for each in self._saved(branch)) + self._masks(branch)

    def _saved_inside(self) -> list[Saved]:
        """The activations that the inside of attention saves; a flash kernel saves none."""
        if self.kernel:
            return []
        # the probabilities and, with dropout, those after it, unless the backward pass makes these again
        keeps_after = self.dropout and "masks" not in self.recompute
        after = [Saved(self.scores, self.seq_len, self.operand, of_product=True)] * keeps_after
        return [Saved(self.scores, self.seq_len, self.itemsize), *after]

    def _rest_inside(self) -> int:
        """Bytes of what else the inside of attention saves: a mask, or in a flash kernel a sum for each row."""
        return self.statistics * FLOAT32 if self.kernel else self._mask(self.scores)

    def _probabilities(self) -> int:
        """Bytes that the inside of attention saves, as the forward pass makes them."""
        return sum(each.bytes for each in self._saved_inside()) + self._rest_inside()

    def _mask(self, elements: int) -> int:
        """Bytes of the saved mask of a dropout of so many elements, a bit for each (`fiddlex.models.dropout`)."""
        rows = -(-elements // (8 * MASK_ROW))
        return rows * MASK_ROW * (self.dropout and "masks" not in self.recompute)

    def _local(self, width: int) -> int:
        """Elements of an array whose last dimension, of size `width`, tensor parallelism shards."""
        return self.tokens * (width // self.tensor)

    def _inputs(self, product: Product) -> int:
        """Elements of a product's input as it is saved: gathered, except by products in pieces, which gather again."""
        return self._local(product.inputs) if product.split == "inputs" else self._whole_input(product) // self.parts

    def _whole_input(self, product: Product) -> int:
        """Elements of the input of a product whose inputs are not sharded, at all positions."""
        return self.tokens * product.inputs

    def _outputs(self, product: Product) -> int:
        """Elements of a product's output."""
        width = product.outputs * product.replicas
        return self._local(width) if product.split == "outputs" else self.tokens * width

    def _kernel(self, product: Product) -> int:
        """Elements of a product's kernel."""
        return product.inputs * product.outputs * product.replicas // (self.tensor if product.split else 1)

    @property
    def _products(self) -> list[Product]:
        return [each for branch in self.branches for each in branch if isinstance(each, Product)]

    def weight_stash(self) -> int:
        """Bytes that I saves for W: gradients of the products' outputs and, with `full` recomputation, their inputs."""
        products = [each for each in self._products if not each.shares_input]
        # Products in pieces exchange in I all that they need: whole gradients of the outputs of row-parallel products,
        # and the whole inputs of column-parallel ones, whether they are recomputed or not.
        gathered = sum(self._whole_input(each) for each in products if each.split == "outputs" and self.parts > 1)
        local = sum(self._inputs(each) for each in products if each.split == "inputs" or self.parts == 1)
        gradients = sum(map(self._outputs, self._products))
        return (gradients + gathered + local * self._again) * self.operand

    def working(self) -> int:
        """Bytes at the peak of the layer's passes: in attention's forward pass, or in a branch's backward pass.

        During a branch's backward pass, memory holds the recomputed activations that are still needed, including those
        of earlier branches. It also holds the gradients of an activation function's output and inputs, those inside
        attention, or what `_gathered_again` counts. Throughout, it holds the kernel of the current product as read from
        the stack, the gradient of this kernel, and the input and output of the residual stream.
        """
        again, moments, before = self._again, [], -self._input  # the stash counts the layer's input
        for branch in self.branches:
            saved = self._bytes(branch)
            if any(isinstance(each, Attention) for each in branch):
                moments.append(self._attention_forward() + (before + saved) * (not self.backend.fuses))
                moments.append((before + saved) * again + self._attention_backward())
                saved += self._probabilities() if self.backend.fuses else self._softmax()
            else:
                moments.append((before + saved) * again + self._activation_gradients(branch))
            if self.parts > 1:
                moments.append(before * again + self._gathered_again(branch, again=again))
            before += saved
        kernel = max(map(self._kernel, self._products))
        return max(moments) + 2 * (kernel + self.residual) * self.itemsize

    def _activation_gradients(self, branch: Branch) -> int:
        """Bytes of the gradients of an activation function's output and inputs."""
        activations = (each for each in branch if isinstance(each, Activation))
        return sum((1 + each.num_inputs) * self._local(each.units) * self.itemsize for each in activations)

    def _gathered_again(self, branch: Branch, *, again: bool) -> int:
        """Bytes that a branch's first products hold while they gather their input again for the kernels' gradients."""
        first = list(itertools.takewhile(lambda each: isinstance(each, Norm | Product), branch))
        products = [each for each in first if isinstance(each, Product)]
        outputs = sum(map(self._outputs, products)) * self.itemsize
        whole = sum(self._whole_input(each) for each in products if not each.shares_input) * self.operand
        return self._bytes(first) * again + outputs + whole

    def _softmax(self) -> int:
        """Bytes of the scores, and of the arrays that the inside of attention saves."""
        return self.scores * FLOAT32 * (not self.kernel) + self._probabilities()

    def _attention_forward(self) -> int:
        """Bytes that attention's forward pass holds."""
        if self.kernel == BLOCKED:
            # the scores of a block of queries, and their exponentials
            return 2 * self.block_scores * FLOAT32 + self._probabilities()
        if self.kernel == SPLASH:
            # It reads and writes heads one after the other, and writes its sum of each row of the scores to all lanes.
            return self.by_head * self.itemsize + self.statistics * self.backend.lanes * FLOAT32
        if self.backend.fuses:
            return self.scores * FLOAT32
        # for the dropout of each score, two random words and the two words before them
        words = 4 * self.scores * WORD * (self.dropout and not self.backend.draws_inside)
        return self._softmax() + words

    def _attention_backward(self) -> int:
        """Bytes of scores and probabilities, which are read or recomputed, and of the gradients of both."""
        if self.kernel == BLOCKED:  # probabilities and scores, both with gradients, and what was read or given by head
            return self._probabilities() + 4 * self.block_scores * FLOAT32 + 2 * self.by_head * self.itemsize
        if self.kernel == SPLASH:  # what the forward pass reads and gives, and the gradients of it
            return self._probabilities() + 2 * self.by_head * self.itemsize
        if self.kernel:  # gradients of queries in float32, and of keys, values and the output in the compute dtype
            heads = self.statistics * self.head_size
            return self._probabilities() + heads * (FLOAT32 + 3 * self.itemsize)
        if self.backend.rounds_gradients:
            return self._softmax() + 2 * self.scores * self.itemsize
        if not self.backend.fuses:
            return self._softmax() * self._scores_again + 2 * self.scores * FLOAT32
        if not self._scores_again:  # probabilities as read, probabilities as operands, and both gradients
            return self.scores * (self.itemsize + 3 * self.operand)
        # for larger heads, the product of the probabilities and their gradient, in float32
        weighted = FLOAT32 if self.head_size > self.backend.narrow_head else 0
        return self.scores * (FLOAT32 + self.itemsize + weighted)

    @property
    def _scores_again(self) -> bool:
        """Whether the backward pass computes attention's scores again."""
        return self._again or "attention" in self.recompute

    def copied(self) -> int:
        """Bytes of the weights, in a row of the stack, that the backend copies (`Backend.whole_lanes_copy`)."""
        if not self.backend.whole_lanes_copy or self.head_size % self.backend.lanes:
            return 0
        return sum(
            self._kernel(before) * self.operand
            for branch in self.branches
            for before, operation in itertools.pairwise(branch)
            if isinstance(operation, Attention) and isinstance(before, Product)
        )


def outside_layers(config: Config, backend: Backend) -> int:
    """Bytes at the peak of embedding and head, whichever takes more.

    The head holds this device's slice of the logits in float32, B·P·V where it scores P positions of a row; unless
    `Backend.fuses`, it also holds their exponentials and gradients. It also holds the activations that it scores, with
    their gradients. The embedding's backward pass holds the gradient of the table's slice, V·H, in float32, before and,
    unless `Backend.scatters_in_place`, after it adds rows to this gradient.
    """
    network, itemsize = network_of(config), ITEMSIZES[config.model.dtype]
    columns = config.padded_vocab_size // config.mesh.vocab_shards
    tokens = num_sequences(config) * config.model.seq_len
    scored = num_sequences(config) * network.task.num_scored
    if backend.rounds_gradients or backend.rounds_logits:
        of_logit = FLOAT32 + itemsize  # in addition to the logits, only the rounded gradients
    else:
        of_logit = FLOAT32 if backend.fuses else 3 * FLOAT32
    logits = scored * columns * of_logit
    stream = 3 * tokens * network.hidden * itemsize
    tables = (1 if backend.scatters_in_place else 2) * columns * network.hidden * FLOAT32
    return stream + max(logits, tables)
