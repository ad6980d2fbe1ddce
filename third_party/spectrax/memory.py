"""Prints the temporary memory of fiddlex's train step and of SpectraX's, for growing numbers of microbatches.

    python -m third_party.spectrax.memory --python=ENV/bin/python [--microbatches=8,16,32 --config.mesh.pipe=2 …]

ENV is an environment with SpectraX (third_party/README.md). No step is run: the bytes are those of XLA's buffer
assignment on one device. Microbatches have a constant size. SpectraX keeps the inputs of stages and recomputes the
rest; the nearest to that is fiddlex with `pipeline.recompute=full`, which is one of the rows.
"""

import dataclasses
import json
import pathlib
import subprocess
import tempfile

from absl import flags

from experiments.benchmarks.known_systems import KNOWN, program, require_packages
from experiments.benchmarks.programs import make_program, temporary_bytes
from experiments.benchmarks.same_start import require_comparable, write_start
from experiments.benchmarks.sizes import base_config, with_microbatches
from experiments.benchmarks.systems import ROOT
from fiddlex.config import Config
from fiddlex.config.overrides import replaced
from fiddlex.errors import FiddlexError
from fiddlex.terminal.command_line import define_changes, run

_CONFIG = define_changes(base_config())
_PYTHON = flags.DEFINE_string("python", None, "the Python that has SpectraX", required=True)
_MICROBATCHES = flags.DEFINE_list("microbatches", ["8", "16", "32"], "numbers of microbatches to compile")


def main(argv: list[str]) -> None:
    """Prints the table."""
    counts = [int(count) for count in _MICROBATCHES.value]
    require_packages("spectrax-1f1b", KNOWN["spectrax-1f1b"], program(_PYTHON.value))
    require_comparable(_CONFIG.value.validate())
    print(f"| MB, pipe={_CONFIG.value.mesh.pipe} | " + " | ".join(f"m = {count}" for count in counts) + " |")
    print("|---|" + "---:|" * len(counts))
    for recompute in ("none", "full"):
        config = replaced(_CONFIG.value, {"pipeline.schedule": "1f1b", "pipeline.recompute": recompute})
        programs = [make_program(with_microbatches(config, count)) for count in counts]
        _print_row(f"fiddlex 1f1b, recompute={recompute}", [temporary_bytes(each, each.step) for each in programs])
    for mode in ("1f1b", "gpipe"):
        sizes = [_theirs(with_microbatches(_CONFIG.value, count), mode) for count in counts]
        _print_row(f"SpectraX {mode}", sizes)


def _print_row(name: str, sizes: list[int]) -> None:
    print(f"| {name} | " + " | ".join(f"{size / 1e6:.1f}" for size in sizes) + " |", flush=True)


def _theirs(config: Config, mode: str) -> int:
    """The temporary bytes of SpectraX's step.

    Raises:
      FiddlexError: when its program fails.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        job = write_start(config, folder, check_steps=1, cores=[])
        job = dataclasses.replace(job, options={"mode": mode, "processes": str(config.mesh.pipe)})
        (folder / "job.json").write_text(json.dumps(dataclasses.asdict(job)), encoding="utf-8")
        line = [program(_PYTHON.value), "-m", "third_party.spectrax.temporaries", str(folder / "job.json")]
        done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise FiddlexError(f"SpectraX's step does not compile:\n{done.stderr[-2000:]}")
    return int(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    run(main)
