"""Scores examples with a model's weights: the held-out data, texts of a task, or examples that the caller has."""

import functools
import math
from collections.abc import Callable, Iterator

import jax
import numpy as np

from fiddlex.config import Config
from fiddlex.data import ExampleSource
from fiddlex.data.continuations import ContinuationExamples
from fiddlex.data.dataset import Dataset
from fiddlex.data.statistics import majority_share
from fiddlex.errors import ConfigError, NonFiniteError
from fiddlex.models.bert import BERT
from fiddlex.models.weights import Weights
from fiddlex.terminal.progress import phase
from fiddlex.train.inference.evaluation import summarise
from fiddlex.train.inference.forward import ScoreFunction, make_eval_step
from fiddlex.train.inference.predictions import Answerable, predicted_continuations, predicted_labels
from fiddlex.train.record import Record
from fiddlex.train.step.feed import DeviceBatch, Feed
from fiddlex.train.step.gradients import HeadFunction
from fiddlex.train.step.program import Program


def always() -> bool:
    return True


class LeftError(Exception):
    """An evaluation was left, since its result is no longer wanted."""


class Scorer:
    """Scores examples with the compiled forward pass of a program; `weights` is always a program's master weights."""

    def __init__(self, program: Program, dataset: Dataset, feed: Feed):
        self._program, self._dataset, self._feed = program, dataset, feed
        self._config: Config = program.config

    def evaluate(self, weights: Weights, step: int, *, goes_on: Callable[[], bool]) -> Record:
        """The record of `Trainer.evaluate`; `step` is the number of steps done."""
        parts = self._program.model.parts
        values = self._of_heldout(self._scores, weights, goes_on=goes_on)
        record = {"step": step} | summarise(values, parts, self._config.model.task, self._dataset)
        loss = record["eval_loss"]
        if not math.isfinite(loss):
            why = "have exploded" if step else "that the run starts with are to blame"
            raise NonFiniteError(f"The held-out loss at step {step} is {loss}: the weights {why}.")
        return record

    def predictions(self, weights: Weights) -> list[Record]:
        """The records of `Trainer.predictions`."""
        examples, model = self._feed.require_heldout(), self._program.model
        if isinstance(examples, ContinuationExamples):
            return predicted_continuations(examples, self._of_heldout(self._scores, weights)[:, 0])
        if isinstance(examples, Answerable) and isinstance(model, BERT):
            return predicted_labels(examples, self._of_heldout(self._compiled(model.log_probabilities), weights))
        raise ConfigError(
            f"model.objective={self._config.model.task} on {self._config.data.eval_source or self._dataset.source}: "
            "predictions are told of labelled texts and of texts to be continued (a GPT with "
            "data.eval_source=jsonl:PATH), not of running text."
        )

    def scores(self, weights: Weights, examples: ExampleSource) -> np.ndarray:
        """The values of `Trainer.scores`, float64 [example, part, 3]."""
        number = -(-len(examples) // self._config.data.global_batch_size)
        return _values(self._scores, weights, self._feed.examples(examples), number=number)

    def majority(self) -> float:
        """The share of the most common token, see `Trainer.majority`."""
        return majority_share(self._feed.host_heldout(), self._config.model.vocab_size)

    @functools.cached_property
    def _scores(self) -> ScoreFunction:
        return self._compiled(self._program.model.scores)

    def _compiled(self, head: HeadFunction) -> ScoreFunction:
        program = self._program
        return make_eval_step(program.model, self._config, head=head, mesh=program.mesh, layout=program.layout)

    def _of_heldout(self, step: ScoreFunction, weights: Weights, *, goes_on: Callable[[], bool] = always) -> np.ndarray:
        """The values that `step` (from `make_eval_step`) returns for the held-out examples, float64 [example, …]."""
        return _values(step, weights, self._feed.heldout(), number=len(self._feed.host_heldout()), goes_on=goes_on)


def _values(
    step: ScoreFunction,
    weights: Weights,
    batches: Iterator[tuple[DeviceBatch, int]],
    *,
    number: int,
    goes_on: Callable[[], bool] = always,
) -> np.ndarray:
    """What `step` returns for `batches`, `number` of them, float64 [example, …]; LeftError if `goes_on` is False."""
    values: list[np.ndarray] = []
    with phase("Evaluating", total=number, unit="batches") as evaluating:
        batch: tuple[DeviceBatch, int] | None = next(batches)
        while batch is not None:
            if not goes_on():
                raise LeftError
            inputs, size = batch
            # One batch at a time: if several independent programs are in flight, the fake devices of a CPU can
            # deadlock, each waiting for a collective of another program. The host prepares the next batch meanwhile.
            running = step(weights, inputs)
            batch = next(batches, None)
            values.append(np.asarray(jax.device_get(running), np.float64)[:size])
            evaluating.advance(len(values))
    return np.concatenate(values)
