"""Measures the peak memory of experiments/convert.py, there and back, on a random Llama.

    python -m experiments.benchmarks.convert_memory --directory=/tmp/convert_memory [--model=1b]

It writes a folder of the published shape in bfloat16, converts it to a workdir and back, and prints for each way the
process's largest private memory (RssAnon) and its largest memory with the pages of mapped files (RssFile), beside the
bytes of the weights. The kernel can drop the pages of mapped files whenever it needs their memory.
"""

import functools
import json
import pathlib
import subprocess
import sys
import threading
import time

import ml_dtypes
import numpy as np
from absl import app, flags

from fiddlex.config.files import load_config
from fiddlex.costs.sizes import num_parameters
from fiddlex.interop.architectures import architecture_of, config_json
from fiddlex.interop.huggingface import wanted_tensors
from fiddlex.interop.safetensors_files import Tensor, write_folder
from fiddlex.models.registry import make_model

REPOSITORY = pathlib.Path(__file__).parents[2]
GB = 1e9
INTERVAL_S = 0.02

_DIRECTORY = flags.DEFINE_string(
    "directory", None, "directory to make folders in; takes five times the weights", required=True
)
_MODEL = flags.DEFINE_string("model", "1b", "a model of configs/llama.py")


def main(argv: list[str]) -> None:
    """Prints a line of JSON for each way."""
    del argv
    directory = pathlib.Path(_DIRECTORY.value)
    config = load_config(f"{REPOSITORY / 'configs' / 'llama.py'}:{_MODEL.value}")
    folder, workdir, back = (directory / name for name in ("hf", "workdir", "back"))
    if not folder.exists():
        folder.mkdir(parents=True)
        described = config_json(config)
        (folder / "config.json").write_text(json.dumps(described | {"dtype": "bfloat16"}))
        wanted = wanted_tensors(architecture_of(described), make_model(config))
        make = [functools.partial(_random, each.shape) for each in wanted]
        dtype = np.dtype(ml_dtypes.bfloat16)
        write_folder(folder, [Tensor(each.name, each.shape, dtype, f) for each, f in zip(wanted, make, strict=True)])
    for source, target in ((f"hf:{folder}", workdir), (workdir, f"hf:{back}")):
        command = [sys.executable, "experiments/convert.py", f"--source={source}", f"--target={target}"]
        start = time.monotonic()
        peaks = _peaks(command)
        size = 4 * num_parameters(config)
        figures = {name: round(value / GB, 2) for name, value in peaks.items()} | {"weights_float32_gb": size / GB}
        ratio = round(peaks["anonymous_gb"] / size, 2)
        print(json.dumps({"to": str(target), "seconds": round(time.monotonic() - start)} | figures | {"ratio": ratio}))


def _random(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)


def _peaks(command: list[str]) -> dict[str, float]:
    """The largest private memory and the largest memory of a process, in bytes."""
    peaks = {"anonymous_gb": 0.0, "with_files_gb": 0.0}
    process = subprocess.Popen(command, cwd=REPOSITORY)
    done = threading.Event()

    def watch() -> None:
        while not done.wait(INTERVAL_S):
            try:
                text = pathlib.Path(f"/proc/{process.pid}/status").read_text()
            except OSError:
                return
            kib = {line.split(":")[0]: float(line.split()[1]) for line in text.splitlines() if line.endswith("kB")}
            anonymous = kib.get("RssAnon", 0.0) * 1024
            peaks["anonymous_gb"] = max(peaks["anonymous_gb"], anonymous)
            peaks["with_files_gb"] = max(peaks["with_files_gb"], anonymous + kib.get("RssFile", 0.0) * 1024)

    watcher = threading.Thread(target=watch)
    watcher.start()
    status = process.wait()
    done.set()
    watcher.join()
    if status:
        raise SystemExit(f"{command} ended with status {status}.")
    return peaks


if __name__ == "__main__":
    app.run(main)
