"""A run's numbers at Weights & Biases, beside TensorBoard, when `train.wandb_project` names a project.

The package wandb comes with the extra `wandb`; its own environment variables choose the account and the mode
(`WANDB_API_KEY`, `WANDB_ENTITY`, `WANDB_MODE=offline`). The file `wandb.json` of the workdir holds the id of the run
there, so that a resumed run continues the same one. Invariants: no record is written twice; no failure of wandb, its
service or the network ends or delays training, apart from the time limits below at the start and the end of a run.

A killed process loses what wandb's service had not yet written, of the last 15 seconds by default. Online the resumed
run fills that gap as far as it trains those steps again; offline it cannot know of it. `metrics.jsonl` has all records.
"""

import importlib
import json
import logging
import math
import re
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fiddlex.config import Config
from fiddlex.errors import ConfigError, installation
from fiddlex.files.small_files import read_object
from fiddlex.files.whole_files import write_whole
from fiddlex.train.run.workdir import writing

logger = logging.getLogger(__name__)

_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_INIT_TIMEOUT_S = 30.0
_FINISH_TIMEOUT_S = 60.0


class WandbRun:
    """The run at Weights & Biases; `resumed_step` 0 starts another one. Raises ConfigError without the package wandb.

    If it cannot be started online, wandb keeps its numbers in files of the workdir, which `wandb sync` sends later. If
    it fails afterwards, one warning follows and nothing more is written.
    """

    def __init__(self, workdir: Path, config: Config, *, resumed_step: int):
        try:
            self._wandb = importlib.import_module("wandb")
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"train.wandb_project={config.train.wandb_project!r} needs the package wandb, and there is no module "
                f"{error.name!r}: {installation('wandb')}, or leave train.wandb_project empty."
            ) from error
        self._workdir, self._config = workdir, config
        path = workdir / "wandb.json"
        known = read_id(path, project=config.train.wandb_project) if resumed_step else None
        self._id = known or secrets.token_hex(4)
        self.written_step = math.inf if known else -1  # the last step whose records may already be there; -1: none
        with writing(path):
            write_whole(path, json.dumps({"project": config.train.wandb_project, "id": self._id}))
        self._run: Any = self._start()

    def write(self, scalars: Mapping[str, float], *, step: int) -> None:
        # The step is a number like the others: wandb's own steps never go back, and here records may share one.
        self._try("write to", lambda run: run.log({"step": step, **scalars}))

    def close(self, *, failed: bool) -> None:
        """Ends the run at Weights & Biases, and waits at most a minute until all has been sent."""
        self._try("finish", lambda run: run.finish(exit_code=int(failed)))
        self._run = None

    def _start(self) -> Any:
        try:
            run = self._init(mode=None)
        except Exception as error:
            logger.warning(
                "The run cannot be started at Weights & Biases (%s). Its numbers are kept in %s; send them with `wandb "
                "sync`.",
                _first_line(error),
                self._workdir / "wandb",
            )
            try:
                self._wandb.teardown()  # the service still holds the id
                run = self._init(mode="offline")
            except Exception as another:
                logger.warning("Nothing is written for Weights & Biases: %s.", _first_line(another))
                return None
        if not run.offline:
            logger.info("The run at Weights & Biases: %s", run.url)
        return run

    def _init(self, *, mode: str | None) -> Any:
        run = self._wandb.init(
            project=self._config.train.wandb_project,
            id=self._id,
            resume="allow",
            name=self._workdir.name,
            dir=str(self._workdir),
            config=json.loads(self._config.to_json()),
            mode=mode,
            settings=self._wandb.Settings(
                console="off", silent=True, init_timeout=_INIT_TIMEOUT_S, finish_timeout=_FINISH_TIMEOUT_S
            ),
        )
        run.define_metric("*", step_metric="step")
        if not run.offline:  # the summary of a resumed run is what was received
            self.written_step = min(self.written_step, run.summary.get("step", -1))
        return run

    def _try(self, what: str, action: Callable[[Any], object]) -> None:
        if self._run is None:
            return
        try:
            action(self._run)
        except Exception as error:
            self._run = None
            logger.warning(
                "Cannot %s the run at Weights & Biases: %s. Training goes on without it.", what, _first_line(error)
            )


def read_id(path: Path, *, project: str) -> str | None:
    """The id in `wandb.json` of the run in `project`; None when it has none that wandb could have made."""
    try:
        known = read_object(path)
    except (OSError, ValueError):
        return None
    found = known.get("id") if known.get("project") == project else None
    return found if isinstance(found, str) and _ID.fullmatch(found) else None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
