"""The configs' models on the smallest TPU slices that hold them, and how one of them is compiled."""

import json
import pathlib
import subprocess
import sys
from typing import Any, NamedTuple

from fiddlex.errors import FiddlexError

_ROOT = pathlib.Path(__file__).parents[2]


class CompileCase(NamedTuple):
    """A model on a slice.

    Attributes:
      config: path of the config file below configs/, with its argument.
      topology: the topology to compile for.
      overrides: values of config fields, by path.
    """

    config: str
    topology: str
    overrides: dict[str, Any]


def _replicas(data: int, microbatches: int) -> dict[str, Any]:
    return {"mesh.data": data, "pipeline.num_microbatches": microbatches}


def _pipeline(data: int, pipe: int, tensor: int, microbatches: int) -> dict[str, Any]:
    mesh = {"mesh.pipe": pipe, "mesh.tensor": tensor}
    return {**_replicas(data, microbatches), **mesh, "pipeline.schedule": "1f1b", "pipeline.num_chunks": 1}


CASES = [
    CompileCase("gpt_tiny.py", "tpu:v5e:2x4", {}),
    CompileCase("gpt2_small.py", "tpu:v5e:1x1", {}),
    CompileCase("gpt2_medium.py", "tpu:v5e:1x1", {**_replicas(1, 128), "pipeline.recompute": "full"}),
    CompileCase("gpt2_large.py", "tpu:v6e:1x1", {**_replicas(1, 128), "pipeline.recompute": "full"}),
    CompileCase("gpt2_xl.py", "tpu:v5e:2x2", {**_replicas(4, 128), "pipeline.recompute": "full"}),
    CompileCase("bert_large.py", "tpu:v5e:2x2", {**_replicas(4, 16), "pipeline.recompute": "full"}),
    CompileCase("gpt3.py:1.7b", "tpu:v5e:2x4", _replicas(8, 64)),
    CompileCase("gpt3.py:3.6b", "tpu:v6e:2x4", _pipeline(4, 1, 2, 128)),
    CompileCase("gpt3.py:7.5b", "tpu:v5p:2x2x1", _pipeline(1, 1, 4, 512)),
    CompileCase("gpt3.py:18.4b", "tpu:v5p:2x2x2", _pipeline(1, 1, 8, 1024)),
    CompileCase("gpt3.py:39.1b", "tpu:v5p:2x2x4", _pipeline(1, 2, 8, 1536)),
    CompileCase("gpt3.py:76.1b", "tpu:v5p:2x4x4", _pipeline(1, 4, 8, 1792)),
    CompileCase("gpt3.py:145.6b", "tpu:v5p:4x4x4", _pipeline(1, 8, 8, 2304)),
    CompileCase("gpt3.py:174.6b", "tpu:v5p:4x4x4", _pipeline(1, 8, 8, 1536)),
    CompileCase("gpt3.py:310.1b", "tpu:v5p:4x4x8", _pipeline(1, 16, 8, 2160)),
    CompileCase("gpt3.py:529.6b", "tpu:v5p:4x8x8", _pipeline(2, 16, 8, 1260)),
    CompileCase("gpt3.py:1008b", "tpu:v5p:8x8x8", _pipeline(1, 64, 8, 3072)),
    CompileCase("gpt3.py:1008b", "tpu:v5p:8x16x24", {}),
]


def measure(case: CompileCase, limit_s: int) -> dict[str, Any]:
    """The report of `compile.py` on a case; only the case and the time limit when compiling takes too long.

    Raises:
      FiddlexError: when it does not compile; `compile.py` has said why on standard error.
    """
    overrides = [f"--config.{name}={value}" for name, value in case.overrides.items()]
    program = [sys.executable, str(_ROOT / "experiments/compile.py"), f"--config={_ROOT}/configs/{case.config}"]
    command = [*program, f"--topology={case.topology}", "--format=json", *overrides]
    asked = {"config": case.config, "topology": case.topology, "overrides": case.overrides}
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return {**asked, "limit_s": limit_s}
    if done.returncode:
        raise FiddlexError(
            f"{case.config} does not compile for {case.topology}: compile.py ended with status {done.returncode} and "
            "the words above."
        )
    facts = json.loads(done.stdout.splitlines()[-1])
    return {**asked, **facts}
