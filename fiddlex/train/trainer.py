"""The `Trainer`: a config brought to life on a mesh, for programs and notebooks.

    trainer = Trainer(config)
    losses = [record["loss"] for record in trainer.steps(100)]
    weights = trainer.weights()

The binaries are thin over it: `fiddlex.train.loop` adds the workdir, checkpoints and the terminal.
"""

import contextlib
import copy
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from fiddlex.config import Config
from fiddlex.data import load_corpus
from fiddlex.errors import CheckpointError, ConfigError, DataError, NonFiniteError
from fiddlex.mesh import make_mesh
from fiddlex.models.functional import Weights
from fiddlex.train.checkpoint import Checkpoints
from fiddlex.train.feed import DeviceBatch, Feed
from fiddlex.train.metrics import Record
from fiddlex.train.program import Program
from fiddlex.train.sampling import SamplingConfig, generate_text
from fiddlex.train.state import TrainState
from fiddlex.train.step import Metrics, make_eval_step, make_logits
from fiddlex.train.workdir import check_same_shapes, read_config


class Dispatched(NamedTuple):
    """A step that the devices have been given; `Trainer.record` waits for it.

    Attributes:
      step: its number, 1 for the first batch.
      metrics: device values, see `fiddlex.train.step.make_train_step`.
      time_s: when it was dispatched, by the monotonic clock.
    """

    step: int
    metrics: Metrics
    time_s: float


class Trainer:
    """Model, data, optimizer and compiled steps of one config.

    Args:
      config: validated here.

    Attributes:
      config: a copy of it.
      mesh: the mesh it runs on.
      corpus: its data.
      layout: its schedule, and where every weight lies.
      step: updates done; the next step trains on batch number `step`, counted from 0.

    Raises:
      ConfigError, DataError, DeviceError: before anything is computed.
    """

    def __init__(self, config: Config):
        self.config = config = copy.deepcopy(config.validate())  # later changes of the caller's are not this run's
        self.mesh = make_mesh(config.mesh)
        self._program = program = Program(config, self.mesh)
        self.corpus = load_corpus(config.data, vocab_size=config.model.vocab_size, seq_len=config.model.seq_len)
        self.step = 0
        self.layout = program.layout
        self._eval_step = make_eval_step(program.model, config, mesh=self.mesh, layout=self.layout)
        self._logits = make_logits(program.model, config, mesh=self.mesh, layout=self.layout)
        self._feed = Feed(self.corpus, config, self.mesh)
        self._compiled: jax.stages.Compiled | None = None
        self._state: TrainState | None = None
        self._batches: Iterator[DeviceBatch] | None = None
        self._ready: list[DeviceBatch] = []
        self._last_done_s = -math.inf

    @property
    def state(self) -> TrainState:
        """The train state, made from `train.seed` when nothing was restored. Every step donates and replaces it."""
        if self._state is None:
            self._state = self._program.init_state()
        return self._state

    @property
    def delay(self) -> int:
        """By how many updates the oldest weights that a batch of this run uses lag behind."""
        return max((max(windows.semantics.delays) for windows in self.layout.windows.values()), default=0)

    def compile(self) -> float:
        """Compiles the train step, if that is still to do; returns the seconds it took."""
        start = time.monotonic()
        if self._compiled is None:
            self._compiled = self._program.lower().compile()
        return time.monotonic() - start

    def dispatch(self) -> Dispatched:
        """Gives the devices one step and returns without waiting for it; prepares the next batch meanwhile."""
        self.compile()
        assert self._compiled is not None
        source = self._program.source
        self._prepare(source.num_batches(self.step))
        state, inputs = self.state, source.inputs(self._ready, self.step)
        self._state, metrics = self._compiled(state, inputs)
        dispatched = Dispatched(self.step + 1, metrics, time.monotonic())
        self.step += 1
        self._ready.pop(0)
        # A DataError is that of a step to come, not of this one: it comes again when a step needs the batch.
        with contextlib.suppress(DataError):
            self._prepare(len(self._ready) + 1)
        return dispatched

    def _prepare(self, number: int) -> None:
        """Has so many batches ready, the next step's first."""
        while len(self._ready) < number:
            if self._batches is None:
                self._batches = self._feed.train(self.step + len(self._ready))
            try:
                self._ready.append(next(self._batches))
            except DataError:
                self._batches = None
                raise

    def record(self, dispatched: Dispatched) -> Record:
        """Waits for a step and returns its record.

        Returns:
          `step`, `loss` (mean over the batch's tokens, at the weights before the update), `grad_norm` (before
          clipping), `learning_rate`, `step_time_s` and `tokens_per_second`; in float16 also `loss_scale`, and
          `grad_norm` is None where it overflowed and the update was left out.

        Raises:
          NonFiniteError: when the loss, the gradient or the updated weights are not finite, naming the tensors.
        """
        names = ("loss", "grad_norm", "learning_rate", "weights_finite")
        loss, grad_norm, learning_rate, finite = map(float, jax.device_get([dispatched.metrics[n] for n in names]))
        now = time.monotonic()
        step_time = now - max(self._last_done_s, dispatched.time_s)
        self._last_done_s = now
        scale = float(dispatched.metrics.get("loss_scale", 0.0))
        skipped = scale > 1 and not math.isfinite(grad_norm)  # by loss scaling; without one to lower, it is an error
        gradient_finite = math.isfinite(loss) and (math.isfinite(grad_norm) or skipped)
        if not (gradient_finite and finite):
            text = _describe_nonfinite(dispatched, loss, grad_norm)
            raise NonFiniteError(text, before_update=not gradient_finite)
        record = {
            "step": dispatched.step,
            "loss": loss,
            "grad_norm": None if skipped else grad_norm,
            "learning_rate": learning_rate,
            "step_time_s": step_time,
            "tokens_per_second": self.config.tokens_per_step / step_time,
        }
        return record | {"loss_scale": scale} if scale else record

    def steps(self, num_steps: int) -> Iterator[Record]:
        """Takes `num_steps` steps while the caller loops over it, and yields their records.

        A record comes when the next step has been dispatched, so leaving the loop early leaves a step unrecorded.
        """
        previous = None
        for _ in range(num_steps):
            dispatched = self.dispatch()
            if previous is not None:
                yield self.record(previous)
            previous = dispatched
        if previous is not None:
            yield self.record(previous)

    def require_heldout(self) -> None:
        """Raises DataError when `evaluate` would, because nothing is held out."""
        self._feed.require_heldout()

    def evaluate(self) -> Record:
        """Scores the held-out data with the present weights, every held-out token once (or `data.eval_batches`).

        Returns:
          `step`, `eval_loss` (nats per token), `eval_perplexity`, `eval_tokens`, and where the text is known
          `eval_loss_per_byte`.

        Raises:
          DataError: when nothing is held out.
          NonFiniteError: when the loss is not finite.
        """
        batches = self._feed.heldout()
        batch: DeviceBatch | None = next(batches)
        sums: list[dict[str, float]] = []
        while batch is not None:
            # One batch at a time: with several programs that do not depend on each other in flight, the fake devices
            # of a CPU can each wait for another one's collective. The host prepares the next batch meanwhile.
            running = self._eval_step(self.state.weights, batch)
            batch = next(batches, None)
            sums.append(jax.device_get(running))
        loss_sum, tokens = (math.fsum(float(part[name]) for part in sums) for name in ("loss_sum", "weight_sum"))
        loss = loss_sum / tokens
        if not math.isfinite(loss):
            raise NonFiniteError(f"The held-out loss at step {self.step} is {loss}: the weights have exploded.")
        record = {
            "step": self.step,
            "eval_loss": loss,
            "eval_perplexity": math.exp(min(loss, 700.0)),
            "eval_tokens": int(tokens),
        }
        if bytes_per_token := self.corpus.heldout.bytes_per_token:
            record["eval_loss_per_byte"] = loss / bytes_per_token
        return record

    def generate(self, prompt: str, num_tokens: int, sampling: SamplingConfig | None = None) -> Iterator[str]:
        """Pieces of text that continue `prompt`, up to `num_tokens` tokens or the end of the document.

        Raises:
          ConfigError: when the data has no tokenizer, or for sampling values out of range.
        """
        tokenizer = self.corpus.tokenizer
        if tokenizer is None:
            raise ConfigError(
                f"{self.corpus.source} has no tokenizer to turn text into tokens: set data.tokenizer to the JSON file "
                "its tokens were made with."
            )
        weights = self.state.weights
        return generate_text(
            lambda tokens, positions: self._logits(weights, tokens, positions),
            tokenizer,
            prompt,
            num_tokens,
            seq_len=self.config.model.seq_len,
            config=sampling or SamplingConfig(),
        )

    def weights(self) -> Weights:
        """A copy of the master weights on the host: float32, whole, without padding, layers stacked in their order."""
        whole = jax.tree.map(np.array, jax.device_get(self.state.weights))
        rows = np.asarray(self.layout.placement.rows)
        whole["layers"] = jax.tree.map(lambda w: w[rows], whole["layers"])
        whole["embedding"]["tokens"] = whole["embedding"]["tokens"][: self.config.model.vocab_size]
        return whole

    def save(self, checkpoints: Checkpoints) -> None:
        """Saves the state as a checkpoint of the present step, in the background.

        Raises:
          CheckpointError: when it cannot be written.
        """
        layers = self.layout.placement.layers
        state = self.state._replace(ahead=self._program.source.older(self.state))
        checkpoints.save(state, self.step, layers=layers, fingerprint=self.corpus.fingerprint())

    def restore(self, checkpoints: Checkpoints, *, weights_only: bool = False) -> bool:
        """Goes on from the newest checkpoint that is whole; returns whether there is one.

        Args:
          checkpoints: of the run's workdir.
          weights_only: leave the optimizer's state where it is, for a trainer that only evaluates or samples.

        Raises:
          CheckpointError: when there are checkpoints and none can be read, or they are of other data.
        """
        abstract = self._program.abstract_state._replace(ahead=self._program.source.abstract_older())
        if weights_only:
            abstract = abstract._replace(optimizer=(), ahead={})
        fingerprint = "" if weights_only else self.corpus.fingerprint()
        state = checkpoints.restore_newest(
            abstract,
            layers=self.layout.placement.layers,
            fingerprint=fingerprint,
            move_damaged=not weights_only,
        )
        if state is None:
            return False
        if not weights_only:
            state = self._program.resume(state)
        self._state, self.step = state, int(state.step)
        self._batches, self._ready = None, []
        return True


def load_trainer(workdir: Path, change: Callable[[Config], Config] = lambda config: config) -> Trainer:
    """The trainer of a run, with the weights of its newest good checkpoint, to evaluate or sample from.

    Args:
      workdir: the run's directory; nothing in it is changed.
      change: gives the config to use from the run's own.

    Raises:
      CheckpointError: when there is no run, no checkpoint, or none that can be read, or when the changed config has
        weights of other shapes.
    """
    saved = read_config(workdir)
    config = change(saved)
    config.pipeline.semantics, config.pipeline.semantics_schedule = "sync", ""  # nothing is updated
    check_same_shapes(saved, config, workdir)
    trainer = Trainer(config)
    with Checkpoints(workdir) as checkpoints:
        if not trainer.restore(checkpoints, weights_only=True):
            raise CheckpointError(
                f"--workdir={workdir} has no checkpoint yet. Train with train.checkpoint_every above 0, or wait for "
                "the first one."
            )
    return trainer


def _describe_nonfinite(dispatched: Dispatched, loss: float, grad_norm: float) -> str:
    names = []
    flags = jax.device_get(dispatched.metrics["nonfinite"])
    for path, flag in jax.tree_util.tree_leaves_with_path(flags):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        layers = np.flatnonzero(flag)
        if flag.ndim and len(layers):
            which = "all layers" if len(layers) == len(flag) else f"layers {', '.join(map(str, layers))}"
            names.append(f"{name} ({which})")
        elif flag.any():
            names.append(name)
    if len(names) == len(jax.tree.leaves(flags)):
        names = ["all"]
    return (
        f"Step {dispatched.step} is not finite: loss {loss}, gradient norm {grad_norm}. "
        f"Gradients that are not finite: {', '.join(names) or 'none; the weights overflowed in the update'}."
    )
