"""Layouts to train on, and how one is held against the plain reference: losses, gradient norms and weights.

`COVERING` has every pair of levels that two parts of a layout can take together (`test_layouts` proves it and says what
a level is). `further_layouts` has the layouts of the full tier.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from fiddlex.config import Config, ModelConfig
from fiddlex.data import Loader
from fiddlex.train.run.transfer.weights import whole
from fiddlex.train.trainer import Trainer
from fiddlex.xla.ahead_of_time import places, runs
from fiddlex.xla.compiled_collectives import collectives
from tests import reference, reference_bert, reference_llama
from tests.flax.modules import LOSSES
from tests.flax.published import PACKAGES
from tests.train.bert import random_dataset

TOLERANCE = 1e-5  # relative, float32, five or ten steps
OWN = pathlib.Path(__file__).with_name("own_rules.py")
FLAX = LOSSES | {name: each.loss for name, each in PACKAGES.items()}  # of Flax modules
TABLES = pathlib.Path(__file__).parents[1] / "schedules"


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, a mesh, and how it is trained there, as the columns of the tables below have it.

    Attributes:
      mesh: devices along data, pipe and tensor, as in 2x1x4.
      model: gpt or gpt,untied; an objective of BERT with where its norms stand, as in mlm,pre; llama, whose heads of
        queries share one of keys in pairs, or llama,tied with one head of keys for all, biases of queries, keys and
        values, and tied embeddings; nnx, linen and others are the Flax modules of tests/flax/modules.py and
        tests/flax/published.py.
      schedule: a name, or that of a CSV file in tests/schedules; 1f1b,strict has `pipeline.order=strict`.
      v: stages on each rank.
      m: microbatches.
      layers: of each stage in order, as in 1,2,1; "-" for four layers, spread as evenly as possible; balanced,6 for six
        layers in the stages that the planner finds fastest.
      sp, zero1, dropout: the column's name, or "-" for without.
      recompute, semantics: as the config has them.
      optimizer: as the config has it; adamw,offload has its state on the host, and adamw,streams the
        layers' weights and gradients too; own:lamb is a function of own_rules.py, with the learning rate of that file.
      prediction: as the config has it, with its order and scale, as in extrapolate,2,0.7; "-" for none.
    """

    mesh: str
    model: str
    schedule: str
    v: str
    m: str
    layers: str
    sp: str
    recompute: str
    optimizer: str
    zero1: str
    dropout: str
    semantics: str
    prediction: str = "-"

    def __str__(self) -> str:
        words = (self.mesh, self.model, self.schedule, f"v{self.v}", f"m{self.m}", *dataclasses.astuple(self)[5:])
        return "-".join(word.replace(",", "") for word in words if word != "-")

    @property
    def num_layers(self) -> int:
        return sum(map(int, self.layers.removeprefix("balanced,").split(","))) if self.layers != "-" else 4

    @property
    def num_steps(self) -> int:
        return 5 if self.semantics == "sync" and self.model not in PACKAGES else 10

    def apply(self, config: Config) -> Config:
        """Changes `config` into that of the case, and returns it."""
        objective, _, norms = self.model.partition(",")
        if objective == "llama":
            self._apply_llama(config.model, tied=norms == "tied")
        elif objective == "gpt":
            config.model.tied_embeddings = norms != "untied"
        elif objective in FLAX:
            config.model.family, config.model.vocab_size = objective, 264  # which the ranks of each mesh share
        else:
            config.model.family, config.model.objective, config.model.post_norm = "bert", objective, norms == "post"
        if objective == "classification":
            config.data.labels = "a,b,c"
        if objective == "multiple_choice":
            config.data.num_choices = 3
        if objective in ("classification", "multiple_choice"):
            config.data.source = "jsonl:none"  # the examples are made up
        config.model.num_layers, config.model.dropout = self.num_layers, 0.1 if self.dropout != "-" else 0.0
        mesh, pipeline, optimizer = config.mesh, config.pipeline, config.optimizer
        mesh.data, mesh.pipe, mesh.tensor = map(int, self.mesh.split("x"))
        mesh.sequence_parallel = self.sp != "-"
        schedule, _, order = self.schedule.partition(",")
        table = TABLES / f"{schedule}.csv"
        pipeline.schedule, pipeline.order = f"file:{table}" if table.exists() else schedule, order or "auto"
        pipeline.num_chunks, pipeline.num_microbatches = int(self.v), int(self.m)
        pipeline.layers_per_stage = "balanced" if self.layers.startswith("balanced") else self.layers.replace("-", "")
        pipeline.recompute, pipeline.semantics, config.train.num_steps = self.recompute, self.semantics, self.num_steps
        if self.prediction != "-":
            pipeline.prediction, order, scale = self.prediction.split(",")
            pipeline.prediction_order, pipeline.prediction_scale = int(order), float(scale)
        name, _, on_host = self.optimizer.partition(",")
        optimizer.name = name.replace("own:", f"{OWN}:")
        pipeline.weights_memory = "host" if on_host == "streams" else "device"
        optimizer.offload, optimizer.zero1 = bool(on_host), self.zero1 != "-"
        optimizer.schedule = f"{OWN}:rate" if name.startswith("own:") else "constant"
        optimizer.learning_rate = 0.1 if optimizer.name == "sgd" else 1e-3
        # optax.adafactor does not multiply its decay by the learning rate, and ours does (test_optimizer.py).
        optimizer.weight_decay = 0.0 if optimizer.name == "adafactor" else 0.1
        optimizer.clip_norm = 0.5
        # Some gradients of biases are pure rounding noise: all those of the keys, since a bias of the keys has no
        # effect on attention. At Adam's usual 1e-8 that noise would be scaled up to whole steps, differently in any two
        # programs.
        if optimizer.name not in ("sgd", "lion", "adafactor"):
            optimizer.epsilon = 1e-5
        return config

    @staticmethod
    def _apply_llama(model: ModelConfig, *, tied: bool) -> None:
        model.family, model.ffn_size, model.tied_embeddings = "llama", 48, tied
        model.num_kv_heads, model.head_dim, model.qk_norm = (1, 0, False) if tied else (2, 10, True)
        model.qkv_bias = tied
        model.rope_base, model.rope_scaling, model.rope_factor = 100.0, "linear" if tied else "llama3", 2.0
        if not tied:
            model.rope_original_len = 16

    def trainer(self, config: Config) -> Trainer:
        """Its trainer, on the text of `config` or on examples made up for BERT."""
        self.apply(config)
        return Trainer(config, None if config.model.task == "lm" else random_dataset(config))


def case(row: str) -> Case:
    """The case of a row of a table."""
    return Case(*row.split())


def cases(table: str) -> list[Case]:
    """The cases of a table, whose first line names the columns."""
    header, *rows = table.strip().splitlines()
    names = [field.name for field in dataclasses.fields(Case)]
    assert header.split() in (names, names[:-1])
    return list(map(case, rows))


# Of the default tier, beside `COVERING`, which predicts the weights of other optimizers.
MUON = case("2x2x2 gpt 1f1b 1 4 3,1 sp selective muon zero1 - 2bw extrapolate,1,1.4")

# Layers that do not divide by the stages, in cuts that are not the even ones (`test_balanced.py`); the default tier has
# the first case.
BALANCED = cases("""
mesh  model      schedule         v m layers     sp recompute optimizer zero1 dropout semantics
1x4x1 gpt        zb_h1            1 8 balanced,6 -  full      adamw     zero1 -       sync
1x2x1 gpt        zb_v             2 4 balanced,6 -  none      adamw     zero1 dropout 2bw
""")

# Llama in the default tier: heads of keys split and shared over tensor ranks, by the step with a flush and without one;
# and a GPT with a table of its own for the scores.
LLAMA = cases("""
mesh  model      schedule         v m layers  sp recompute optimizer zero1 dropout semantics
2x2x2 llama      interleaved_1f1b 2 4 -       -  none      adamw     zero1 -       sync
1x2x2 llama,tied zb_h1            1 4 3,1     -  selective muon      zero1 dropout 2bw
2x1x4 llama      1f1b             1 2 -       sp none      lamb      zero1 -       sync
1x2x2 gpt,untied 1f1b             1 2 -       -  none      adamw     zero1 -       sync
""")

# Schedules published after the zero-bubble paper, and strict ones; in the default tier, each once.
PUBLISHED = cases("""
mesh  model      schedule    v m layers          sp recompute optimizer zero1 dropout semantics
1x4x1 gpt        v_half      2 8 2,1,1,1,1,1,1,1 -  none      adamw     -     dropout sync
2x3x1 llama,tied v_min       2 4 1,1,2,1,1,1     -  selective adamw     zero1 -       sync
1x4x2 gpt        1f1b,strict 1 8 -               -  none      adamw     zero1 dropout sync
""")

# Schedules that a search finds; of stages alike and uneven ones.
FOUND = cases("""
mesh  model      schedule v m layers          sp recompute optimizer zero1 dropout semantics
1x4x1 gpt        auto     2 8 2,1,1,1,1,1,1,1 -  none      adamw     -     dropout sync
2x2x2 llama,tied auto     1 4 3,1             -  selective lamb      zero1 -       sync
""")

# Of the tables, `odd` has stages on ranks 0, 2, 0 and 1, two of them with the backward pass split into I and W,
# so that activations hop both ways and some ranks have one chunk only; `mixed` has whole and split backwards.
COVERING = cases("""
mesh  model                schedule         v m layers  sp recompute optimizer zero1 dropout semantics     prediction
1x2x1 gpt                  gpipe            1 2 -       -  full      sgd       zero1 -       2bw           extrapolate,2,0.7
2x2x2 gpt                  1f1b             1 4 -       -  none      adafactor zero1 -       delay:3       -
2x1x2 gpt                  zb_v             2 4 3,1     sp selective sgd       zero1 -       vertical_sync -
2x2x2 gpt                  interleaved_1f1b 2 4 -       sp none      adamw     zero1 -       vertical_sync momentum,1,1
2x2x1 gpt                  zb_h2            1 4 -       -  none      lamb      zero1 dropout sync          -
1x3x1 gpt                  odd              2 4 -       -  none      sgd       zero1 dropout sync          -
2x2x1 gpt                  interleaved_1f1b 2 4 -       -  none      lamb      zero1 dropout stash         extrapolate,1,1
2x2x1 mlm_nsp,post         gpipe            1 2 -       -  full      lamb      -     -       sync          -
1x3x2 mlm_nsp,post         gpipe            1 4 1,2,1   sp selective adamw     zero1 dropout sync          -
2x1x2 mlm_nsp,post         zb_h2            1 1 -       -  none      sgd       zero1 dropout 2bw           -
1x4x2 mlm,pre              1f1b             1 4 -       sp none      sgd       -     dropout sync          -
1x2x2 mlm,pre              interleaved_1f1b 2 4 1,2,1,1 -  selective adam      zero1 dropout 2bw           extrapolate,2,1
1x1x1 mlm,pre              zb_h1            1 1 -       -  full      adamw     zero1 dropout delay:3       -
2x3x1 mlm,pre              zb_h2            1 2 1,2,1   -  none      adamw     zero1 dropout delay:3       momentum,2,1
2x2x2 classification,post  zb_h1            1 4 3,1     -  none      adamw     -     -       sync          -
1x1x1 classification,post  interleaved_1f1b 3 1 1,2,1   -  full      sgd       -     -       2bw           -
1x1x1 classification,post  zb_v             2 1 3,1     -  none      adamw     -     -       stash         -
1x4x2 classification,post  zb_h2            1 4 1,2,1,1 sp selective adafactor -     dropout stash         -
2x1x1 multiple_choice,post interleaved_1f1b 2 4 -       -  none      adafactor -     dropout sync          -
2x2x2 multiple_choice,post zb_v             2 2 -       -  full      adam      zero1 dropout sync          -
1x3x2 multiple_choice,post odd              2 4 -       sp none      adamw     -     dropout 2bw           -
2x4x1 multiple_choice,post zb_h1            1 4 -       -  selective adam      -     dropout vertical_sync -
""")  # noqa: E501  # rows of a table

# What a backward pass may make again, by itself and together.
RECOMPUTED = cases("""
mesh  model         schedule         v m layers sp recompute                  optimizer zero1 dropout semantics
2x1x2 gpt           1f1b             1 2 -      sp gelu,norms,masks           adamw     zero1 dropout sync
1x2x2 mlm_nsp,post  zb_h1            1 4 3,1    sp gelu,norms,masks           lamb      zero1 dropout 2bw
1x2x2 llama         zb_h1            1 4 -      sp gelu,norms                 adamw     zero1 -       sync
2x2x1 llama,tied    interleaved_1f1b 2 4 -      -  attention,gelu,norms,masks sgd       zero1 dropout 2bw
""")

# Master weights and optimizer state on the host: rows of several layers and of one, and without a flush.
OFFLOADED = cases("""
mesh  model         schedule         v m layers  sp recompute  optimizer      zero1 dropout semantics
2x2x2 gpt           interleaved_1f1b 2 4 -       sp none       adamw,offload  zero1 -       sync
1x2x2 mlm_nsp,post  zb_h1            1 4 3,1     -  selective  lamb,offload   -     dropout 2bw
""")

# Weights and gradients of the layers on the host too; transfers of one row and of two, in periods of one tick and more.
STREAMED = cases("""
mesh  model         schedule         v m layers      sp recompute  optimizer      zero1 dropout semantics
2x2x2 gpt           breadth_first    3 4 2,1,1,1,2,1 sp gelu,norms adamw,streams  zero1 dropout sync
1x2x1 mlm_nsp,post  breadth_first    3 2 1,1,1,1,1,1 -  selective  lamb,streams   -     -       sync
""")

# Those in which something waits long enough to be spilled, where the stash may be on the host.
SPILLED = cases("""
mesh  model         schedule         v m layers  sp recompute        optimizer zero1 dropout semantics
2x4x1 gpt           1f1b             1 8 -       -  none             adamw     zero1 dropout sync
2x2x2 mlm_nsp,post  interleaved_1f1b 2 4 -       sp gelu,norms,masks sgd       zero1 dropout sync
1x4x1 gpt           zb_h2            1 8 2,1,1,1 -  none             sgd       zero1 -       sync
1x4x2 llama         1f1b             1 8 -       sp full             sgd       zero1 -       2bw
2x4x1 gpt           zb_h2            1 8 -       -  selective        adamw     zero1 dropout 2bw
""")

# DualPipeV by its name, and as a table with pairs of a forward and a backward and with tokens for communication, in
# both orders of the ticks.
PAIRED = cases("""
mesh  model         schedule         v m layers  sp recompute optimizer zero1 dropout semantics
1x2x1 gpt           dual_pipe_v,ahead 2 2 -       -  selective adamw     -     dropout sync
1x2x1 gpt           overlapped       2 4 -       -  none      sgd       zero1 -       sync
""")

# An update rule and the learning rates that functions in a file give.
OWN_RULES = cases("""
mesh  model       schedule         v m layers  sp recompute optimizer     zero1 dropout semantics
2x2x1 gpt         1f1b             1 4 3,1     -  none      own:lamb      zero1 -       2bw
""")

# The other rules of that file; lion where no gradient is rounding alone.
FURTHER_OWN_RULES = cases("""
mesh  model       schedule         v m layers  sp recompute optimizer     zero1 dropout semantics
2x2x2 gpt         interleaved_1f1b 2 4 -       sp none      own:belief    zero1 dropout vertical_sync
2x2x2 llama,tied  1f1b             1 4 3,1     -  selective own:belief    -     -       stash
2x1x2 gpt,untied  1f1b             1 2 -       sp none      own:nesterov  zero1 -       sync
2x2x1 mlm_nsp,post zb_h1           1 4 3,1     -  none      own:nesterov,offload zero1 dropout 2bw
2x2x2 gpt         interleaved_1f1b 2 4 -       -  none      own:lamb      zero1 -       sync
1x3x1 gpt         odd              2 4 -       -  none      own:lamb      zero1 dropout sync
2x3x1 llama,tied  zb_v             2 4 1,1,2,1,1,1 - selective own:clipped zero1 -      delay:2
2x2x2 gpt         1f1b             1 4 3,1     -  none      own:adafactor zero1 dropout 2bw
1x2x1 mlm,pre     zb_h2            1 2 -       -  none      own:adafactor zero1 -       sync
2x2x2 llama       interleaved_1f1b 2 4 -       -  none      own:muon      zero1 -       sync
1x4x1 llama,tied  zb_h1            1 4 -       -  full      own:muon      -     -       2bw
1x2x2 llama       1f1b             1 2 -       -  none      own:lion      zero1 -       sync
""")

_references: dict[Any, dict[str, Any]] = {}


class Differences(NamedTuple):
    """The largest relative differences from the reference."""

    losses: float
    gradients: float | None  # of a tensor's mean gradient, which the optimizer keeps; None where it is not compared
    weights: float  # of a tensor


def check_layout(case: Case, config: Config) -> Differences:
    """Trains, and holds losses, gradient norms and weights against the reference's; gradients too, of Flax modules."""
    trainer = case.trainer(config)
    expected = _expected_training(case, trainer, trainer.weights())
    records = list(trainer.steps(case.num_steps))
    losses = np.asarray([r["loss"] for r in records])
    np.testing.assert_allclose(losses, expected["losses"], rtol=TOLERANCE)
    np.testing.assert_allclose([r["grad_norm"] for r in records], expected["norms"], rtol=TOLERANCE)

    def size(path: Any, wanted: np.ndarray) -> Any:
        name = jax.tree_util.keystr(path)
        if case.optimizer.startswith("adafactor") and name.endswith("['qkv']['bias']"):
            return np.inf  # it scales by the whole tensor's size and has no epsilon to damp the noise of the keys' bias
        if name.endswith("['key']['bias']"):  # apart from others it is nothing but noise
            wanted = _leaf_at(expected["weights"], (*path[:-1], jax.tree_util.DictKey("kernel")))
        return np.linalg.norm(wanted)

    weights = _largest_difference(reference.unstack(trainer.weights()), expected["weights"], size)
    gradients = None
    if trainer.config.model.family in FLAX and not case.optimizer.startswith("own:"):
        gradients = _difference_of_gradients(trainer, expected["optimizer"])
    assert trainer._compiled is not None
    found = collectives(trainer._compiled.as_text() or "", places(trainer.mesh), runs(trainer.layout))
    assert not [each for each in found if each.count is None]
    return Differences(float(np.max(np.abs(losses / expected["losses"] - 1))), gradients, weights)


def _difference_of_gradients(trainer: Trainer, expected: Any) -> float:
    """Of the mean that an optimizer with momentum keeps of all gradients, of which some are zero but for rounding."""
    name = "trace" if trainer.config.optimizer.name == "sgd" else "mu"
    kept = whole(optax.tree.get(trainer.state.optimizer, name), trainer._program.model, trainer.layout)
    wanted = reference.in_parts(lambda state: optax.tree.get(state, name), expected)
    least = 1e-3 * max(np.linalg.norm(each) for each in jax.tree.leaves(wanted))
    return _largest_difference(reference.unstack(kept), wanted, lambda _, each: max(np.linalg.norm(each), least))


def _largest_difference(found: Any, expected: Any, size: Callable[[Any, np.ndarray], Any]) -> float:
    """Of the leaves' norms, relative to the size of each."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    largest = 0.0
    for path, leaf in jax.tree_util.tree_leaves_with_path(found):
        wanted = _leaf_at(expected, path)
        difference = float(np.linalg.norm(leaf - wanted) / size(path, wanted))
        assert difference < TOLERANCE, f"{jax.tree_util.keystr(path)}: relative difference {difference:.2e}"
        largest = max(largest, difference)
    return largest


def _expected_training(case: Case, trainer: Trainer, initial: Any) -> dict[str, Any]:
    """The reference's run; layouts share it, since they must not differ but by the delay of their weights."""
    delays = _delays_of(case.semantics, trainer.layout.placement.layers_per_stage)
    key = (case.model, case.num_layers, case.dropout, case.optimizer, case.num_steps, delays, case.prediction)
    key += (trainer.config.model.seq_len,)
    if key not in _references:
        config = trainer.config
        loader = Loader(trainer.dataset.train, global_batch_size=config.data.global_batch_size, seed=0, vocab_size=257)
        batches = [loader.batch(step) for step in range(case.num_steps)]
        if case.model.startswith("mlm"):
            assert len({batch["weights"].sum() for batch in batches}) != 1  # unequal counts of masked tokens
        family = {"gpt": reference.gpt_loss_fn, "llama": reference_llama.loss_fn, "bert": reference_bert.loss_fn}
        loss_fn = (family | FLAX)[config.model.family]
        _references[key] = reference.train(config, initial, batches, lambda step: delays, loss_fn)
    return _references[key]


def _delays_of(semantics: str, layers_per_stage: Sequence[int]) -> reference.Delays:
    """What the papers say of each stage's weights: PipeDream, section 3.3, and 2BW, section 3.1."""
    n = len(layers_per_stage)
    by_stage = {
        "sync": [0] * n,
        "2bw": [1] * n,
        "stash": [n - 1 - stage for stage in range(n)],
        "vertical_sync": [n - 1] * n,
        "delay:2": [2] * n,
        "delay:3": [3] * n,
    }[semantics]
    layers = [delay for delay, count in zip(by_stage, layers_per_stage, strict=True) for _ in range(count)]
    return reference.Delays(by_stage[0], tuple(layers), by_stage[-1])


def _leaf_at(tree: Any, path: Any) -> np.ndarray:
    for entry in path:
        tree = tree[entry.key if hasattr(entry, "key") else entry.idx]
    return np.asarray(tree)
