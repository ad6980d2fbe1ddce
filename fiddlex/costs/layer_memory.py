"""The memory of the passes through one layer, and through embedding and head, on one device.

The functions sum over the operations of `fiddlex.models.spec`: the activations that a layer saves for its backward pass
are those that its operations save. Korthikanti et al., MLSys 2023, section 4, count those of another model in the same
way. The letters are those of `fiddlex.models.device_arrays`.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

from fiddlex.config import Config
from fiddlex.config.values.recompute import FULL
from fiddlex.config.values.stash import SAME
from fiddlex.costs.attention_memory import AttentionMemory
from fiddlex.costs.backend import Backend
from fiddlex.hardware.flash import SPLASH
from fiddlex.models.device_arrays import FLOAT32, ITEMSIZES, DeviceArrays, Saved, num_scored
from fiddlex.models.registry import network_of
from fiddlex.models.spec import Attention, Branch, Network, Norm, Operation, Product


@dataclasses.dataclass(frozen=True)
class LayerMemory:
    """The memory that one layer's passes take; sizes are in elements unless a line says bytes."""

    arrays: DeviceArrays
    backend: Backend
    network: Network
    attention: AttentionMemory  # of the inside of attention
    encodes: bool  # whether the stash holds activations in 8 bits (`pipeline.stash_dtype`)

    @classmethod
    def of(cls, config: Config, backend: Backend, *, kernel: str | None = None) -> "LayerMemory":
        """The memory of a config's layers; `kernel` names that of attention, by default the one that `backend` runs."""
        network = network_of(config)
        kernel = backend.flash_kernel(config).name if kernel is None else kernel
        arrays = DeviceArrays.of(
            config, network.hidden, rounds_products=backend.rounds_products, joins_heads=kernel == SPLASH
        )
        return cls(
            arrays=arrays,
            backend=backend,
            network=network,
            attention=AttentionMemory(arrays, backend, network.attention, kernel),
            encodes=config.pipeline.stash_dtype != SAME,
        )

    def stash(self) -> int:
        """Bytes that a forward pass saves for its backward pass: the layer's input alone if it recomputes all."""
        if self._again:
            return self.input
        others = sum(map(self._masks, self.network.branches)) + self.attention.rest() * self.attention.saves
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
        saved = [each for branch in self.network.branches for each in self._saved(branch)]
        return saved + self.attention.saved() * self.attention.saves

    @property
    def _again(self) -> bool:
        """Whether the backward pass runs the whole layer again."""
        return FULL in self.arrays.recompute

    @property
    def input(self) -> int:
        """Bytes of the layer's input; in post-LN, the second norm saves as many, of the sum before it."""
        return self.arrays.residual * self.arrays.itemsize

    def _saved(self, branch: Sequence[Operation]) -> list[Saved]:
        """The activations that operations of a branch save; of attention, without those inside it."""
        saved = list[Saved]()
        for before, operation in itertools.pairwise((Operation(), *branch)):
            saved += operation.saved(self.arrays, before)
            if operation is self.network.reader:
                saved[-1] = saved[-1]._replace(is_input=True)
        return saved

    def _masks(self, branch: Sequence[Operation]) -> int:
        """Bytes of the masks of a branch's dropout, without that inside attention."""
        return sum(each.masks(self.arrays) for each in branch)

    def _bytes(self, branch: Sequence[Operation]) -> int:
        """Bytes that operations of a branch save, as the forward pass makes them; without those inside attention."""
        return sum(each.bytes for each in self._saved(branch)) + self._masks(branch)

    def _outputs(self, product: Product) -> int:
        """Elements of a product's output."""
        return self.arrays.tokens * product.kernel(self.arrays.tensor)[1]

    def _whole_input(self, product: Product) -> int:
        """Elements of the input of a product whose inputs are not sharded, at all positions."""
        return self.arrays.tokens * product.inputs

    def _kernel(self, product: Product) -> int:
        """Elements of a product's kernel."""
        return math.prod(product.kernel(self.arrays.tensor))

    def weight_stash(self) -> int:
        """Bytes that I saves for W."""
        return sum(each.left(self.arrays) for each in self.network.operations)

    def working(self) -> int:
        """Bytes at the peak of the layer's passes: in attention's forward pass, or in a branch's backward pass.

        During a branch's backward pass, memory holds the recomputed activations that are still needed, including those
        of earlier branches. It also holds the gradients of an activation function's output and inputs, those inside
        attention, or what `_gathered_again` counts. Throughout, it holds the kernel of the current product as read from
        the stack, the gradient of this kernel, and the input and output of the residual stream.
        """
        again, moments, before = self._again, [], -self.input  # the stash counts the layer's input
        for branch in self.network.branches:
            saved = self._bytes(branch)
            if any(isinstance(each, Attention) for each in branch):
                moments.append(self.attention.forward() + (before + saved) * (not self.backend.fuses))
                moments.append((before + saved) * again + self.attention.backward())
                saved += self.attention.probabilities() if self.backend.fuses else self.attention.softmax()
            else:
                held = sum(each.held(self.arrays) for each in branch) * self.arrays.itemsize
                held += sum(each.remade(self.arrays) for each in branch) * (not self.backend.fuses)
                moments.append((before + saved) * again + held)
            if self.arrays.parts > 1:
                moments.append(before * again + self._gathered_again(branch, again=again))
            before += saved
        kernel = max(map(self._kernel, self.network.products), default=0)
        return max(moments) + 2 * (kernel + self.arrays.residual) * self.arrays.itemsize

    def _gathered_again(self, branch: Branch, *, again: bool) -> int:
        """Bytes that a branch's first products hold while they gather their input again for the kernels' gradients."""
        first = list(itertools.takewhile(lambda each: isinstance(each, Norm | Product), branch))
        products = [each for each in first if isinstance(each, Product)]
        outputs = sum(map(self._outputs, products)) * self.arrays.itemsize
        whole = sum(self._whole_input(each) for each in products if not each.shares_input) * self.arrays.operand
        return self._bytes(first) * again + outputs + whole

    def copied(self) -> int:
        """Bytes of the weights, in a row of the stack, that the backend copies (`Backend.whole_lanes_copy`)."""
        if not self.backend.whole_lanes_copy or self.attention.head_size % self.backend.lanes:
            return 0
        return sum(
            self._kernel(before) * self.arrays.operand
            for branch in self.network.branches
            for before, operation in itertools.pairwise(branch)
            if isinstance(operation, Attention) and isinstance(before, Product)
        )


def outside_layers(config: Config, backend: Backend) -> int:
    """Bytes at the peak of embedding and head, whichever takes more.

    The head holds this device's slice of the logits in float32, B·P·V where it scores P positions of a row and V is the
    slice of the vocabulary; unless `Backend.fuses`, it also holds their exponentials and gradients. It also holds the
    activations that it scores, with their gradients. The embedding's backward pass holds the gradient of the table's
    slice, V·H, in float32, before and, unless `Backend.scatters_in_place`, after it adds rows to this gradient.
    """
    network, itemsize = network_of(config), ITEMSIZES[config.model.dtype]
    columns = config.padded_vocab_size // network.vocab_shards(config.mesh.vocab_shards)
    tokens, scored = DeviceArrays.of(config, network.hidden).tokens, num_scored(config)
    if backend.rounds_gradients or backend.rounds_logits:
        of_logit = FLOAT32 + itemsize  # in addition to the logits, only the rounded gradients
    else:
        of_logit = FLOAT32 if backend.fuses else 3 * FLOAT32
    logits = scored * columns * of_logit
    stream = 3 * tokens * network.hidden * itemsize
    tables = (1 if backend.scatters_in_place else 2) * columns * network.hidden * FLOAT32
    return stream + max(logits, tables)
