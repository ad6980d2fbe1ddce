"""The result of a run, its best or newest weights, for programs that need neither its data nor its train step."""

import logging
from collections.abc import Callable
from pathlib import Path

from fiddlex.cluster import processes
from fiddlex.cluster.mesh import make_mesh
from fiddlex.config import Config, DataConfig, OptimizerConfig
from fiddlex.config.overrides import FLUSHED, replaced
from fiddlex.config.values.source import lies_in
from fiddlex.data.corpus import corpus_tokenizer
from fiddlex.errors import CheckpointError
from fiddlex.train.inference.decoding import make_decoding
from fiddlex.train.inference.generation import TextGenerator
from fiddlex.train.run.best import restore_result
from fiddlex.train.run.workdir import check_same_shapes, read_config
from fiddlex.train.step.program import Program
from fiddlex.train.step.state import SavedState

logger = logging.getLogger(__name__)


def load_result(
    workdir: Path,
    change: Callable[[Config], Config] = lambda config: config,
    *,
    named_by: str = "--workdir",
    step: int | None = None,
) -> tuple[Program, SavedState]:
    """The program of a run's config, and the run's weights in that program's layout.

    Args:
      workdir: the run's directory.
      change: maps the run's config to the config to use.
      named_by: the flag that named the directory, for messages.
      step: that of the checkpoint to read; None: the run's best weights, or else its newest (`restore_result`).

    Raises:
      CheckpointError: without a run or a readable checkpoint, or when the changed config has weights of other shapes.
    """
    saved, config = result_config(workdir, change, named_by=named_by)
    # No data is read, so that any mesh will do.
    config.data.global_batch_size = config.mesh.data * config.pipeline.num_microbatches
    config.validate()
    program = Program(config, make_mesh(config.mesh))
    state = restore_result(workdir, saved, program, step=step)
    if state is None:
        raise no_checkpoint(workdir, named_by)
    return program, state


def result_config(
    workdir: Path, change: Callable[[Config], Config], *, named_by: str = "--workdir"
) -> tuple[Config, Config]:
    """The config of a run, and the config to use its weights with, not yet validated.

    In the latter, fields of `optimizer`, and those that would change nothing, have their defaults. So no function that
    the workdir names is run.
    """
    saved = read_config(workdir, named_by=named_by)
    config = replaced(change(saved), FLUSHED)
    config.optimizer = OptimizerConfig(zero1=config.optimizer.zero1)
    config = config.without_unused()
    check_same_shapes(saved, config, workdir)
    if processes.is_first() and config.data.eval_source and lies_in(config.data.eval_source, saved.data.source):
        logger.warning(
            "data.eval_source=%s lies in what the run trained on, %s: what is scored, it trained on.",
            config.data.eval_source,
            saved.data.source,
        )
    elif processes.is_first() and _scores_trained(saved.data, config.data):
        logger.warning(
            "The run trained on %.4g%% of %s, and now only %.4g%% are not held out: what is scored may be what the run "
            "trained on, unless the source has held-out data of its own.",
            100 * saved.data.trained_share,
            config.data.source,
            100 * config.data.trained_share,
        )
    return saved, config


def _scores_trained(run: DataConfig, now: DataConfig) -> bool:
    """Whether what `now` holds out of the source is in part what the run trained on."""
    same = lies_in(now.source, run.source) and lies_in(run.source, now.source)
    return same and not now.eval_source and now.trained_share < run.trained_share


def no_checkpoint(workdir: Path, named_by: str = "--workdir") -> CheckpointError:
    return CheckpointError(
        f"{named_by}={workdir} has no checkpoint yet. Train with train.checkpoint_every above 0, or wait for the first "
        "one."
    )


def load_generator(
    workdir: Path, change: Callable[[Config], Config] = lambda config: config, *, add_beginning: bool = True
) -> tuple[TextGenerator, int]:
    """A generator with the result of a run (see `TextGenerator`), and the step of its weights.

    Raises:
      CheckpointError: when `load_result` raises it.
      ConfigError: when the model does not predict the next token, or the config does not tell its tokenizer.
      DataError: when the tokenizer cannot be read.
    """
    program, state = load_result(workdir, change)
    config = program.config
    decoding, tokenizer = make_decoding(program), corpus_tokenizer(config.data, config.model.vocab_size)
    return TextGenerator(decoding, state.weights, tokenizer, add_beginning=add_beginning), int(state.step)
