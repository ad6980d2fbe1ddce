"""Trains the model of a config; resumes by itself from the newest good checkpoint in the workdir.

    python experiments/train.py --config=configs/gpt_tiny.py --workdir=/tmp/gpt_tiny [--config.mesh.data=4 …]

Any field of the config can be overridden. Ctrl-C, SIGTERM and SIGHUP (the terminal was closed) save and exit with
status 130, 143 or 129, as a shell tells of signals, so that a script or scheduler does not take the run for finished;
the same command goes on from there. A run goes on without its log where nobody reads it any more.
"""

import json
import pathlib
import sys

from absl import flags

from fiddlex.config.command_line import define_config, define_workdir, run

_CONFIG = define_config()
_WORKDIR = define_workdir("directory of the run")
_FORMAT = flags.DEFINE_enum("format", "text", ["text", "json"], "json: one JSON object last on standard output")


def main(argv: list[str]) -> None:
    """Trains; prints the sample, or the outcome as JSON."""
    config = _CONFIG.value.validate()

    from fiddlex.train.loop import SAMPLING, train  # jax is imported once the command line is known to be right

    outcome = train(config, pathlib.Path(_WORKDIR.value))
    try:
        if outcome.sample:
            print(f"Sample after {outcome.step} steps (temperature {SAMPLING.temperature}):", file=sys.stderr)
            print(outcome.sample)
        if _FORMAT.value == "json":
            print(json.dumps(outcome.to_dict()))
    finally:
        if outcome.stopped_by:  # which the status tells even where standard output went with the terminal
            sys.exit(128 + outcome.stopped_by)


if __name__ == "__main__":
    run(main)
