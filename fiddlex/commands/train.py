"""Trains the model of a config; resumes automatically from the newest good checkpoint in the workdir.

    fiddlex train --config=gpt_tiny --workdir=/tmp/gpt_tiny [--config.mesh.data=4 …]

Any field of the config can be overridden. Ctrl-C, SIGTERM, SIGHUP (a closed terminal), SIGUSR1 and SIGUSR2 save a
checkpoint and exit with status 130, 143, 129, 138 and 140, as shells report signals, so that a script or scheduler does
not take the run for finished; the same command resumes the run. A run continues without its log when standard error can
no longer be written.
"""

import functools
import json
import logging
import os
import pathlib
import sys
import time

from absl import flags
from ml_collections import config_flags

from fiddlex.cluster import elastic, processes
from fiddlex.cluster.process_flags import define_processes
from fiddlex.config.warmup import long_warmup
from fiddlex.errors import ConfigError
from fiddlex.terminal import library_log
from fiddlex.terminal.command_line import define_config, define_workdir
from fiddlex.terminal.progress import phase
from fiddlex.terminal.readable import counted
from fiddlex.train.run.registered import find

logger = logging.getLogger("fiddlex.train")

_START_S = time.monotonic()  # before jax is imported, which takes seconds
_CONFIG = define_config()
_WORKDIR = define_workdir("directory of the run")
_ELASTIC = flags.DEFINE_bool(
    "elastic", False, "go on with fewer replicas (mesh.data) where processes do not come within --join_timeout_s"
)
_FORCE = flags.DEFINE_bool("force", False, "train although the memory is predicted not to be enough (docs/memory.md)")
_FORMAT = flags.DEFINE_enum("format", "text", ["text", "json"], "json: one JSON object last on standard output")
_join = define_processes()


def main(argv: list[str]) -> None:
    """Trains; prints the sample, or the outcome as JSON."""
    workdir = pathlib.Path(_WORKDIR.value)
    for folder in filter(None, (_WORKDIR.value, _CONFIG.value.train.init_from)):
        find(_CONFIG.value, pathlib.Path(os.path.expanduser(folder)))
    wanted = _join(sizes=functools.partial(elastic.sizes, _CONFIG.value) if _ELASTIC.value else None)
    given = config_flags.get_override_values(flags.FLAGS["config"])
    if (problem := long_warmup(_CONFIG.value)) and "optimizer.warmup_steps" in given:  # else the log tells it
        raise ConfigError(problem)
    config = elastic.shrunk(_CONFIG.value.validate(), wanted, processes.num_processes())
    if config is not _CONFIG.value and processes.is_first():
        text = "The run goes on with %d of %d processes: mesh.data=%d, pipeline.num_microbatches=%d."
        logger.info(text, processes.num_processes(), wanted, config.mesh.data, config.pipeline.num_microbatches)

    with phase("Importing jax"):  # only after the command line has been checked
        from fiddlex.train.loop import SAMPLING, train
        from fiddlex.train.run.records.next_commands import next_commands

    outcome = train(config, workdir, start_s=_START_S, given=_CONFIG.value, force=_FORCE.value)
    try:
        if outcome.sample and processes.is_first():
            print(
                f"Sample after {counted(outcome.step, 'step')} (temperature {SAMPLING.temperature}):", file=sys.stderr
            )
            print(outcome.sample, flush=True)
        if _FORMAT.value == "text" and not outcome.stopped_by:
            for line in next_commands(config, workdir, program=sys.argv[0]):
                logger.info("%s", line)
        if text := library_log.told():
            logger.info("%s", text)
        if _FORMAT.value == "json":
            print(json.dumps(outcome.to_dict()))
    finally:
        if outcome.stopped_by:  # the status reports it even when standard output closed with the terminal
            sys.exit(128 + outcome.stopped_by.signal)
