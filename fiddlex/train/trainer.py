"""The `Trainer`, for programs and notebooks; `fiddlex.train.loop` adds the workdir, checkpoints and terminal output."""

import contextlib
import copy
import functools
import json
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

import fiddlex
from fiddlex.cluster import processes
from fiddlex.cluster.jax_settings import kept_settings
from fiddlex.cluster.malloc_pages import keep_freed_memory
from fiddlex.cluster.mesh import make_mesh
from fiddlex.cluster.program_cache import counting_hits, keep_programs
from fiddlex.config import Config
from fiddlex.costs.utilisation import throughput
from fiddlex.data import ExampleSource
from fiddlex.data.dataset import Dataset, load_dataset
from fiddlex.data.tokenizers import tokenizer_digest
from fiddlex.errors import DataError
from fiddlex.interop.folder import folder_of
from fiddlex.models.weights import Weights
from fiddlex.planner.enough_memory import Use
from fiddlex.schedules.semantics import AUTO
from fiddlex.schedules.text import to_csv
from fiddlex.terminal.progress import phase
from fiddlex.train.inference.decoding import Decoding, make_decoding
from fiddlex.train.inference.generation import TextGenerator, generate
from fiddlex.train.inference.sampling import SamplingConfig
from fiddlex.train.inference.scorer import Scorer, always
from fiddlex.train.record import Record
from fiddlex.train.run.best import restore_result
from fiddlex.train.run.checkpoints.checkpoint import Checkpoints
from fiddlex.train.run.faults.require_memory import require_memory
from fiddlex.train.run.records.metrics import describe_loss
from fiddlex.train.run.transfer.importing import imported
from fiddlex.train.run.transfer.result import no_checkpoint, result_config
from fiddlex.train.run.transfer.weights import placed, pretrained, whole
from fiddlex.train.run.workdir import TOKENS, warn_of_changed_data
from fiddlex.train.step.dispatched import Dispatched, InFlight
from fiddlex.train.step.feed import Feed
from fiddlex.train.step.prepared import Prepared
from fiddlex.train.step.program import Program
from fiddlex.train.step.state import SavedState, TrainState
from fiddlex.train.step.stopwatch import Activity, Stopwatch
from fiddlex.train.step.unflushed import Unflushed
from fiddlex.train.sync_switch import Decision, SyncSwitch


class Compilation(NamedTuple):
    """How the train step was compiled."""

    seconds: float  # of tracing and compilation
    was_kept: bool  # whether an earlier run had compiled the program (`train.compilation_cache`)


class Trainer:
    """Model, data, optimizer and compiled steps of one config on a mesh.

        trainer = Trainer(config)
        losses = [record["loss"] for record in trainer.steps(100)]
        weights = trainer.weights()

    Args:
      config: the constructor validates it.
      dataset: the data; None: the constructor loads what `config.data` names.
      workdir: the directory of the run; several processes keep the tokens of text there, unless `data.cache` names
        another folder.
      stopwatch: measures what the process spends its time on; None: one that starts now.

    Attributes:
      config: the trainer's own copy of the config, settled for the devices (`fiddlex.planner.settle`).
      mesh: the mesh that the trainer runs on.
      dataset: the data.
      layout: the pipeline schedule, and how every weight is sharded.
      step: number of steps done; the next step trains on batch number `step`, counted from 0.
      decision: the change of semantics that the last record led to; None without one. Only
        `pipeline.semantics_schedule=auto` makes decisions.
      throughput: what a step gets done, and the peak of the devices where it is known.

    Raises:
      ConfigError, DataError, DeviceError: the constructor raises these before it computes anything.
    """

    def __init__(
        self,
        config: Config,
        dataset: Dataset | None = None,
        *,
        workdir: Path | None = None,
        stopwatch: Stopwatch | None = None,
    ):
        config = copy.deepcopy(config.validate())  # the caller may change its config later
        keep_programs(config.train.compilation_cache)
        processes.check_equal(_facts(config, workdir))
        processes.set_peer_timeout(config.train.peer_timeout_s)
        with phase("Starting the devices"):
            self.mesh = make_mesh(config.mesh)
        self.throughput = throughput(config, self.mesh.devices.flat[0].device_kind)
        self.stopwatch = stopwatch or Stopwatch()
        with phase("Building the model"):
            self._program = program = Program(config, self.mesh)
        self.config = config = program.config
        with phase(f"Reading {config.data.source}"):
            self.dataset = dataset or load_dataset(config, shared=workdir and workdir / TOKENS)
        checksum = zlib.crc32(to_csv(program.layout.pipeline.lowered.schedule).encode())
        settled = {"pipeline.layers_per_stage": config.pipeline.layers_per_stage, "schedule's checksum": checksum}
        processes.check_equal(settled | self.dataset.facts)
        self.step = 0
        self.layout = program.layout
        self.decision: Decision | None = None
        self._switch: SyncSwitch | None = None
        if config.pipeline.semantics_schedule == AUTO:
            self._switch = SyncSwitch(config, self.layout.pipeline.phases)
        self._feed = Feed(self.dataset, config, self.mesh, workdir=workdir)
        self._scorer = Scorer(program, self.dataset, self._feed)
        self._compiled: jax.stages.Compiled | None = None
        self._state: TrainState | None = None
        self._in_flight = InFlight(self.throughput, self.stopwatch, config.train)
        self._prepared = Prepared(self._feed, self._in_flight, self.stopwatch)

    @property
    def state(self) -> TrainState:
        """The train state, made from `train.seed` if no checkpoint was restored. Every step donates and replaces it."""
        return self.make_state()

    def make_state(self) -> TrainState:
        """Makes the train state unless there is one; returns it, see `state`."""
        if self._state is None:
            with self.stopwatch.measure(Activity.STARTING), phase("Making the first weights"):
                self._state = self._program.init_state()
        return self._state

    @property
    def holds_state(self) -> bool:
        """Whether the train state is there; a step that fails may have taken it over and left nothing of it."""
        return self._state is not None and not any(x.is_deleted() for x in jax.tree.leaves(self._state))

    @property
    def delay(self) -> int:
        """The largest delay, in updates, of the weights that this run computes a batch with."""
        return self.layout.pipeline.delay

    def compile(self) -> Compilation | None:
        """Compiles the train step and waits until all processes have; returns None when it was already compiled.

        Raises:
          DeviceError: when the compiler refuses the step.
        """
        if self._compiled is not None:
            return None
        start = time.monotonic()
        if self.mesh.devices.flat[0].platform == "cpu":
            keep_freed_memory()
        with self.stopwatch.measure(Activity.COMPILATION):
            with phase("Tracing the train step"):
                lowered = self._program.lower()  # which may compile small programs of its own
            with phase("Compiling the train step"), counting_hits() as hits:
                self._compiled = self._program.compile(lowered)
            with phase("Waiting for the other processes"):
                processes.barrier("the first step")  # gloo gives up where a process comes 30 s later than another
        return Compilation(time.monotonic() - start, was_kept=hits.number > 0)

    def dispatch(self) -> Dispatched:
        """Dispatches one step to the devices and prepares the next batch; returns without waiting for the step."""
        self.compile()
        assert self._compiled is not None
        source = self._program.source
        batches = self._prepared.batches
        self._prepared.prepare(source.num_batches(self.step), step=self.step)
        state, inputs = self.state, source.inputs(batches, self.step)
        with self.stopwatch.measure_call():
            self._state, metrics = self._compiled(state, inputs)
        self.step += 1
        dispatched = self._in_flight.dispatched(self.step, metrics)
        batches.pop(0)
        # A DataError here concerns a later step: `prepare` raises it again when that step needs the batch.
        with contextlib.suppress(DataError):
            self._prepared.prepare(len(batches) + 1, step=self.step)
        return dispatched

    def record(self, dispatched: Dispatched) -> Record:
        """Waits for a step and returns its record.

        Returns:
          `step`, `loss` (mean over the scored tokens or labels of the batch, at the weights before the update, with
          `layer_loss`, what layers add, where they do),
          `grad_norm` (before clipping), `learning_rate`, and what `Throughput.rates` returns; in float16 also
          `loss_scale`, and `grad_norm` is None where the gradient overflowed and the step skipped the update. Of a
          step that was skipped for another reason, `skipped` says why: `nonfinite` or `spike`; `loss` and `grad_norm`
          are None where they are not finite.

        Raises:
          NonFiniteError: when the updated weights are not finite, or the loss or the gradient without
            `train.on_nonfinite=skip`; the message names the tensors.
          SpikeError: at a spike without `train.on_spike=skip`.
        """
        record = self._in_flight.record(dispatched)
        self._decide(dispatched.step, record["loss"])
        return record

    def leave_out(self, batches: Sequence[int]) -> None:
        """Leaves out the training batches of these numbers, in ascending order; the batches after them move up."""
        self._feed.leave_out(batches)
        self._prepared.clear()

    def _decide(self, step: int, loss: float | None) -> None:
        if self._switch is None:
            return
        self.decision = self._switch.observe(step, loss)
        self._follow(self._switch)

    def _follow(self, switch: SyncSwitch) -> None:
        """Makes the coming steps follow the phases that the run has decided on."""
        assert isinstance(self._program.source, Unflushed)
        self._program.source.sequence.phases = switch.phases

    def steps(self, num_steps: int, *, progress: bool = True) -> Iterator[Record]:
        """Takes `num_steps` steps while the caller iterates, and yields their records.

        The trainer yields a step's record after it has dispatched the next step. A caller that leaves the loop early
        therefore never gets the record of the last step dispatched. With `progress`, a notebook, or the terminal at
        standard error, shows how far the steps are.
        """
        first, previous = self.step, None
        shown = phase("Training", total=num_steps, unit="steps") if progress else contextlib.nullcontext()
        with shown as training:
            for _ in range(num_steps):
                dispatched = self.dispatch()
                if previous is not None:
                    record = self.record(previous)
                    if training:
                        training.advance(record["step"] - first, describe_loss(record))
                    yield record
                previous = dispatched
            if previous is not None:
                yield self.record(previous)

    def require_heldout(self) -> None:
        """Raises DataError when no data is held out, as `evaluate` would."""
        self._feed.require_heldout()

    def evaluate(self, *, goes_on: Callable[[], bool] = always) -> Record:
        """Scores all held-out data, or `data.eval_batches` batches of it, with the current weights.

        Args:
          goes_on: is called before each batch; once it returns False, the evaluation is left with LeftError.

        Returns:
          `step`, and the numbers that `fiddlex.train.inference.evaluation.summarise` returns.

        Raises:
          DataError: when no data is held out.
          NonFiniteError: when the loss is not finite.
        """
        return self._scorer.evaluate(self.state.weights, self.step, goes_on=goes_on)

    def predictions(self) -> list[Record]:
        """The predictions of the current weights for each held-out example of a task, or each line of continuations.

        They are the records of `predicted_labels` or `predicted_continuations` (`fiddlex.train.inference.predictions`).

        Raises:
          ConfigError: when the held-out data is running text, for which there are only scores.
          DataError: when no data is held out.
        """
        return self._scorer.predictions(self.state.weights)

    def scores(self, examples: ExampleSource) -> np.ndarray:
        """The sums that `Model.scores` returns with the current weights for each example, float64 [example, part, 3].

        There must be at least one example, of the run's objective.

        Raises:
          DataError: when an example has a token outside the vocabulary.
        """
        return self._scorer.scores(self.state.weights, examples)

    def majority(self) -> float:
        """The accuracy of always guessing the most common token, on the held-out tokens that `evaluate` scores."""
        return self._scorer.majority()

    def generate(self, prompt: str, num_tokens: int, sampling: SamplingConfig | None = None) -> Iterator[str]:
        """Yields pieces of text that continue `prompt`, up to `num_tokens` tokens or the end of the document.

        Raises:
          ConfigError: when the model does not predict the next token, when the data has no tokenizer, when the prompt
            is longer than the model's window, or when a sampling value is out of range.
        """
        return (piece.text for (piece,) in self.generator().stream([prompt], num_tokens, sampling))

    def generator(self) -> TextGenerator:
        """Continues texts with the current weights.

        Raises:
          ConfigError: when the model does not predict the next token, or the data has no tokenizer.
        """
        return TextGenerator(self._decoding, self.state.weights, self.dataset.tokenizer)

    def draw(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, sampling: SamplingConfig, *, first_row: int = 0
    ) -> Iterator[np.ndarray]:
        """Yields the next tokens of several texts, int32 [texts]; see `fiddlex.train.inference.generation.generate`.

        Raises:
          ConfigError: when the model does not predict the next token.
        """
        tokenizer = self.dataset.tokenizer
        vocab_size = tokenizer.vocab_size if tokenizer else self.config.model.vocab_size
        return generate(
            self._decoding,
            self._decoding.weights(self.state.weights),
            prompts,
            num_tokens,
            vocab_size=vocab_size,
            config=sampling,
            first_row=first_row,
        )

    @functools.cached_property
    def _decoding(self) -> Decoding:
        return make_decoding(self._program)

    def weights(self) -> Weights:
        """A copy of the master weights on the host: float32, unsharded, without padding, layers in model order."""
        return whole(self.state.weights, self._program.model, self.layout)

    def start_from(self, source: str) -> None:
        """Replaces the initial weights by those of a run's workdir or of `hf:DIR`; see `fiddlex.train.run.transfer`.

        Raises:
          CheckpointError: when there are no readable weights, or they do not fit the model.
          DataError: when `data.tokenizer` cannot be read.
        """
        with phase(f"Reading the weights of {source}"):
            if folder := folder_of(source):
                weights = imported(folder, self._program, self.state.weights)
            else:
                weights = pretrained(Path(source), self.config, self.mesh, self.weights)
                weights = placed(weights, self._program.model, self.layout, self.mesh)
        self._state = self._program.resume(SavedState(self.state.step, weights, self.state.optimizer))

    def save(self, checkpoints: Checkpoints, *, weights_only: bool = False) -> None:
        """Saves the state, or its weights alone, as a checkpoint of the current step, in the background.

        Raises:
          CheckpointError: when the checkpoint cannot be written.
        """
        layers = self.layout.placement.layers
        state = SavedState(self.state.step, self.state.weights) if weights_only else self._program.saved(self.state)
        if self._switch is not None and not weights_only:
            state = state._replace(switch=self._switch.saved())
        checkpoints.save(
            state,
            self.step,
            layers=layers,
            fingerprint=self.dataset.fingerprint,
            padded_vocab=self.config.padded_vocab_size,
        )

    def restore(self, checkpoints: Checkpoints) -> bool:
        """Resumes from the newest undamaged checkpoint; returns whether there is one.

        Raises:
          CheckpointError: when there are checkpoints but none can be read, or when the newest readable one belongs to
            other training data, another kind of optimizer, or a network with other parameters.
        """
        self._state = None  # whose memory the restored one takes
        with phase("Reading the checkpoint"):
            saved = checkpoints.restore_newest(
                self._program.abstract_saved(),
                layers=self.layout.placement.layers,
                fingerprint=self.dataset.fingerprint,
                padded_vocab=self.config.padded_vocab_size,
                move_damaged=True,
            )
        if saved is None:
            return False
        if self._switch is not None and saved.switch:
            self._switch.restore(saved.switch)
            self._follow(self._switch)
        if not saved.optimizer:  # weights alone, as from another program; the optimizer starts afresh
            saved = saved._replace(optimizer=self.state.optimizer)
        self._take(self._program.resume(saved))
        return True

    def load(self, workdir: Path, config: Config) -> bool:
        """Loads the best or newest weights of a run, for evaluation or sampling; returns False if there are none.

        `config` is the config of that run.

        Raises:
          CheckpointError: when there are checkpoints but none can be read.
        """
        saved = restore_result(workdir, config, self._program)
        if saved is None:
            return False
        self._take(TrainState(saved.step, saved.weights, saved.optimizer))
        return True

    def _take(self, state: TrainState) -> None:
        self._state, self.step = state, int(state.step)
        self._prepared.clear()


def load_trainer(
    workdir: Path,
    change: Callable[[Config], Config] = lambda config: config,
    dataset: Dataset | None = None,
    *,
    force: bool = False,
) -> Trainer:
    """A trainer with the weights of a run's best or newest good checkpoint, for evaluation or sampling.

    Args:
      workdir: the run's directory. This function does not modify it, except that several processes keep the tokens of
        text in it.
      change: maps the run's config to the config to use.
      dataset: the data; None: what the changed config names.
      force: whether to go on although the memory will not be enough to score examples
        (`fiddlex.train.run.faults.require_memory`).

    Raises:
      CheckpointError: when the workdir has no run or no readable checkpoint, or when the changed config has weights of
        other shapes.
      ConfigError: when there is too little memory, unless `force`.
    """
    saved, config = result_config(workdir, change)
    trainer = Trainer(config, dataset, workdir=workdir)
    require_memory(trainer.config, trainer.mesh, Use.SCORING, force=force)
    if dataset is None and processes.is_first():
        warn_of_changed_data(saved, trainer.config, workdir, trainer.dataset.digests(trainer.config))
    if not trainer.load(workdir, saved):
        raise no_checkpoint(workdir)
    return trainer


def _facts(config: Config, workdir: Path | None) -> dict[str, object]:
    """What the processes of a run must agree on before any of them computes."""
    sections = json.loads(config.to_json())
    fields = {f"{section}.{field}": value for section, values in sections.items() for field, value in values.items()}
    return (
        fields
        | kept_settings()
        | {
            "the workdir": workdir and str(workdir),  # no earlier wait may be on a key with the path in it
            "the content of data.tokenizer": tokenizer_digest(config.data.tokenizer),
            "the version of fiddlex": fiddlex.__version__,
            "the version of jax": jax.__version__,
        }
    )
