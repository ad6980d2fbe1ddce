"""Compares the predicted memory of train steps with the memory that XLA assigns, for models of real sizes.

    python -m experiments.memory_model --results=docs/studies/memory.jsonl [--case='medium, 1F1B' …]
    python -m experiments.memory_model --platform=gpu --results=docs/studies/memory_gpu.jsonl
    python -m experiments.memory_model --results=docs/studies/memory.jsonl --plot=docs/studies/memory.svg

No step is run, and no TPU or GPU is needed (extras aot and aot-gpu). experiments/memory_cases.py lists the cases. Each
is compiled in its own process until XLA has assigned buffers; generating code after that would take most of the time on
TPUs and does not change the figure. Each case adds a line to the results, so that a stopped study continues where it
stopped; the table at the end shows all results in the file. `--plot` draws them and compiles nothing.
"""

import datetime
import importlib.metadata
import logging
import multiprocessing
import os
import pathlib
import re
import statistics
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from absl import flags

from experiments.memory_cases import CASES, CASES_ON, MemoryCase
from experiments.results import append_result, read_results
from fiddlex.config import Config, rules
from fiddlex.config.files import load_config
from fiddlex.config.overrides import override
from fiddlex.costs.backend import backend_for
from fiddlex.costs.sizes import num_parameters
from fiddlex.errors import ConfigError, DeviceError
from fiddlex.planner.predict import needed_memory
from fiddlex.terminal.command_line import run

logger = logging.getLogger("fiddlex.memory_model")

ROOT = pathlib.Path(__file__).parents[1]
LIMIT_S = 480.0  # time limit of one case
PACKAGES = {"tpu": ("jax", "libtpu"), "gpu": ("jax", "jax-cuda12-plugin")}
AFTER_THE_REPORT = "*after_optimizations_after_buffer_assignment.txt", "*.thunk_sequence.txt"  # on TPUs, on GPUs
SPACES = 0, 5  # XLA's numbers of the device's memory and of the host's
COLOURS = {"gpt": "#0072B2", "bert": "#D55E00", "llama": "#009E73"}  # Okabe and Ito's
NAMES = {"gpt": "GPT", "bert": "BERT", "llama": "Llama, Qwen3"}

_RESULTS = flags.DEFINE_string("results", None, "JSON Lines file of compiled cases, read and added to")
_PLATFORM = flags.DEFINE_enum("platform", "tpu", list(CASES_ON), "gpu: the same cases on H100s")
_CASES = flags.DEFINE_multi_string("case", [], "name of a case to compile; may be given several times; all by default")
_PLOT = flags.DEFINE_string("plot", None, "picture of the results to write; nothing is compiled then")


def main(argv: list[str]) -> None:
    """Compiles the missing cases and prints the table, or draws the results."""
    assert _RESULTS.value  # the program requires it
    path = pathlib.Path(_RESULTS.value)
    cases = CASES_ON[_PLATFORM.value]
    results = read(path, cases)
    if _PLOT.value:
        draw(results, pathlib.Path(_PLOT.value))
        return
    for name in _CASES.value:
        rules.choice("--case", name, tuple(cases))
    for name, case in cases.items():
        if name not in results and (name in _CASES.value or not _CASES.value):
            start = time.monotonic()
            compiled, on_host = compiled_bytes(make_config(case), case.topology)
            results[name] = {"case": name, **case._asdict(), "compiled_bytes": compiled}
            results[name] |= {"compiled_host_bytes": on_host} if on_host else {}
            results[name] |= {"seconds": round(time.monotonic() - start, 1), "date": str(datetime.date.today())}
            results[name] |= {package: importlib.metadata.version(package) for package in PACKAGES[_PLATFORM.value]}
            logger.info("%s: %.2f GB", name, compiled / 1e9)
            append_result(path, results[name])
    print(table(results))


def read(path: pathlib.Path, cases: dict[str, MemoryCase]) -> dict[str, dict[str, Any]]:
    """The results by the name of their case, in the order of the cases, except for cases changed since their result."""
    found = {result["case"]: result for result in read_results(path, ["case", "compiled_bytes"])}
    same = {name: case._asdict().items() <= found.get(name, {}).items() for name, case in cases.items()}
    return {name: found[name] for name in cases if same[name]}


def make_config(case: MemoryCase) -> Config:
    """The config of a case.

    Raises:
      ConfigError: when the config is not valid.
    """
    return override(load_config(str(ROOT / case.config)), *case.changes.split()).validate()


def predicted_bytes(config: Config, topology: str) -> int:
    """The predicted peak memory of a config compiled for a topology such as `tpu:v5e:2x4`; imports no jax."""
    return needed_memory(config, backend_for(topology)).peak


def predicted_host_bytes(config: Config, topology: str) -> int:
    """The predicted bytes in the memory of a device's host."""
    return needed_memory(config, backend_for(topology)).of_host


def compiled_bytes(config: Config, topology: str) -> tuple[int, int]:
    """The bytes that XLA assigns to the train step of a config, arguments included, on a device and on its host.

    Raises:
      DeviceError: when the step does not compile, or not in time.
    """
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    child = spawn.Process(target=_compile, args=(config.to_json(), topology, sender), daemon=True)
    child.start()
    sender.close()  # so that the pipe closes when the child ends
    try:
        answer = receiver.recv() if receiver.poll(LIMIT_S) else f"no buffers assigned after {LIMIT_S:.0f} s"
    except EOFError:
        answer = "the process that compiles ended before it had an answer"
    child.kill()
    child.join()
    if isinstance(answer, str):
        raise DeviceError(f"{topology}: {answer}")
    return answer


def _compile(config_json: str, topology: str, answer: Connection) -> None:
    """Sends the assigned bytes or an error message; runs in its own process, which the parent kills afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XLA_FLAGS"] = f"--xla_dump_to={folder} --xla_dump_hlo_module_re=jit_step"
        from fiddlex.cluster.mesh import make_topology_mesh
        from fiddlex.train.step.program import Program

        errors: list[str] = []

        def compile_step() -> None:
            try:
                program = Program(config, make_topology_mesh(config.mesh, topology))
                program.compile(program.lower())
            except Exception as error:
                errors.append(str(error).partition("\n")[0])

        config = Config.from_json(config_json).validate()
        compiler = threading.Thread(target=compile_step, daemon=True)
        compiler.start()
        while not _assigned(pathlib.Path(folder)) and compiler.is_alive():
            time.sleep(0.2)
        answer.send(_assigned(pathlib.Path(folder)) or [*errors, "XLA wrote no report of its buffers"][0])
        compiler.join()


def _assigned(folder: pathlib.Path) -> tuple[int, int] | None:
    """Bytes of device and host in XLA's report in a folder; None until a later file shows that XLA has completed it.

    The report's sum has the parameters of XLA's inner computations too, which have no memory of their own.
    """
    if not [file for pattern in AFTER_THE_REPORT for file in folder.glob(pattern)]:
        return None
    (report,) = folder.glob("*after_optimizations-memory-usage-report.txt")
    text = report.read_text(encoding="utf-8")
    match, on_host = (re.search(rf"Memory Space: .*color={color}\).*\nTotal bytes: (\d+)", text) for color in SPACES)
    assert match, f"{report} has another form than those of libtpu 0.0.52 and jax 0.10.2"
    (buffers,) = folder.glob("*after_optimizations-buffer-assignment.txt")
    local = re.findall(r"^allocation \d+: size (\d+), page 0, thread-local", buffers.read_text(encoding="utf-8"), re.M)
    return int(match[1]) - sum(map(int, local)), int(on_host[1]) if on_host else 0


def table(results: dict[str, dict[str, Any]]) -> str:
    """The results as a Markdown table in GB, with the median and the largest error."""
    lines = [
        "| case | parameters | data × pipe × tensor | topology | compiled | predicted | |",
        "|---|---:|---:|---|---:|---:|---:|",
    ]
    errors = {}
    for name, result in results.items():
        config = make_config(CASES[name])
        mesh, parameters = config.mesh, num_parameters(config)
        compiled, predicted = result["compiled_bytes"], predicted_bytes(config, result["topology"])
        errors[name] = predicted / compiled - 1
        lines.append(
            f"| {name} | {parameters / 1e9:.2f}B | {mesh.data} × {mesh.pipe} × {mesh.tensor} | "
            f"{result['topology'].partition(':')[2]} | {compiled / 1e9:.2f} | {predicted / 1e9:.2f} | "
            f"{errors[name]:+.1%} |"
        )
    if errors:
        worst = max(errors, key=lambda name: abs(errors[name]))
        median = statistics.median(map(abs, errors.values()))
        lines.append(f"\n{len(errors)} cases: median error {median:.1%}, largest {errors[worst]:+.1%} ({worst}).")
    return "\n".join([*lines, *_host_table(results)])


def _host_table(results: dict[str, dict[str, Any]]) -> list[str]:
    """The lines of a table of what is in the memory of hosts; none where nothing is."""
    lines = ["", "| in the memory of the host, for each device | compiled | predicted | |", "|---|---:|---:|---:|"]
    for name, result in results.items():
        if compiled := result.get("compiled_host_bytes", 0):
            predicted = predicted_host_bytes(make_config(CASES[name]), result["topology"])
            sizes = f"{compiled / 1e9:.2f} | {predicted / 1e9:.2f} | {predicted / compiled - 1:+.1%}"
            lines.append(f"| {name} | {sizes} |")
    return lines if len(lines) > 3 else []


def draw(results: dict[str, dict[str, Any]], path: pathlib.Path) -> None:
    """Draws predicted against compiled bytes, with a band of 10%."""
    from matplotlib.figure import Figure

    if not results:
        raise ConfigError(f"--results={_RESULTS.value} has no cases to draw: run without --plot first.")
    figure = Figure(figsize=(4.6, 4.4), layout="constrained")
    axes = figure.subplots()
    points: dict[str, list[tuple[float, float]]] = {family: [] for family in COLOURS}
    for name, result in results.items():
        config = make_config(CASES[name])
        predicted = predicted_bytes(config, result["topology"])
        points[config.model.family].append((result["compiled_bytes"] / 1e9, predicted / 1e9))
    compiled = [result["compiled_bytes"] / 1e9 for result in results.values()]
    ends = [0.8 * min(compiled), 1.25 * max(compiled)]
    axes.fill_between(ends, [0.9 * x for x in ends], [1.1 * x for x in ends], color="0.9", label="within 10%")
    axes.plot(ends, ends, color="0.5", linewidth=0.8)
    for family, pairs in points.items():
        axes.plot(*zip(*pairs, strict=True), "o", color=COLOURS[family], markersize=4, label=NAMES[family])
    ticks = [size for size in (1, 2, 5, 10, 20, 50, 100) if ends[0] < size < ends[1]]
    for axis in "x", "y":
        axes.set(**{f"{axis}scale": "log", f"{axis}lim": ends})
        axes.set(**{f"{axis}ticks": ticks, f"{axis}ticklabels": ticks})
        axes.tick_params(axis=axis, which="minor", left=False, bottom=False, labelleft=False, labelbottom=False)
    axes.set(xlabel="assigned by XLA, GB", ylabel="predicted, GB")
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path)
    print(f"wrote {path}")


if __name__ == "__main__":
    flags.mark_flag_as_required("results")
    run(main)
