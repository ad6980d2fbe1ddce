"""The flag `--workdir` of `fiddlex schedule`: the schedule of a run, and its sizes, where no other flag gives them."""

from pathlib import Path

from absl import flags

from fiddlex.config.values.every import AUTO
from fiddlex.terminal.command_line import define_path


def define_run() -> None:
    """Defines `--workdir`; `take_run` follows it."""
    define_path("workdir", None, "directory of a run, whose schedule and sizes are those that no flag gives")


def take_run() -> None:
    """Sets `--name`, `--pipe`, `--chunks` and `--microbatches` to those of the run, unless they are given.

    What the run had registered is registered here. Raises as `fiddlex.train.run.workdir.read_config` does.
    """
    if not (workdir := flags.FLAGS["workdir"].value):
        return
    from fiddlex.train.run.kept_schedule import TABLE
    from fiddlex.train.run.workdir import read_config  # imports jax

    config = read_config(Path(workdir))
    name, pipeline = config.pipeline.schedule, config.pipeline
    values: dict[str, str | int] = {"pipe": config.mesh.pipe}
    values |= {"chunks": pipeline.num_chunks, "microbatches": pipeline.num_microbatches}
    if not flags.FLAGS["compare"].present:
        values["name"] = f"file:{workdir}/{TABLE}" if name == AUTO else name
    for flag, value in values.items():
        if not flags.FLAGS[flag].present:
            flags.FLAGS[flag].value = value
