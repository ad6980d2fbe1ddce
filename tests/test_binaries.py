"""The binaries as a user runs them: train, kill, resume, evaluate, generate, mistakes on the command line."""

import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest

from fiddlex.cluster.mesh import num_cores
from fiddlex.terminal.readable import mib
from tests.programs import EXPERIMENTS, ROOT, call, started, without_waits
from tests.small_run import steps

TINY = [
    "--config.model.num_layers=4",
    "--config.model.hidden_size=32",
    "--config.model.seq_len=32",
    "--config.data.global_batch_size=8",
    "--config.data.eval_batches=2",
    "--config.train.log_every=1",
    "--config.train.eval_every=0",
    "--config.train.sample_tokens=0",
]


SIDES = {"source": "train", "eval_source": "eval"}
FILES = [
    "benchmark",
    "bubbles",
    "checkpoint",
    "compile",
    "evaluate",
    "generate",
    "harness",
    "launch",
    "make_task",
    "plan",
    "prepare_data",
    "schedule",
    "train",
    "what_if",
]
MODULES = ["gpu", "memory_model", "predicted_steps", "process_memory", "published", "quality"]


def call_by_hand(
    *command: object, shell: str = 'exec "$@"', status: int = 0, cwd: str | pathlib.Path = "/"
) -> subprocess.CompletedProcess[str]:
    """Runs Python as a shell does, without the tests' own XLA flags."""
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "PYTHONPATH")}
    environment.setdefault("JAX_PLATFORMS", "cpu")  # libtpu, if installed, tells that it finds no TPU
    line = ["bash", "-c", shell, "bash", sys.executable, *map(str, command)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, cwd=cwd, env=environment)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    done.stderr = without_waits(done.stderr)
    return done


@pytest.mark.parametrize("program", [*FILES, *MODULES])
def test_it_starts_by_hand(program: str) -> None:
    start = ["-m", f"experiments.{program}"] if program in MODULES else [str(EXPERIMENTS / f"{program}.py")]
    assert "\nFlags:\n" in call_by_hand(*start, "--help", cwd=ROOT if program in MODULES else "/").stdout


def train_arguments(workdir: pathlib.Path, text_file: pathlib.Path, **train: int) -> list[str]:
    fields = [f"--config.train.{name}={value}" for name, value in train.items()]
    return [
        f"--config={ROOT}/configs/gpt_tiny.py",
        f"--workdir={workdir}",
        f"--config.data.source=text:{text_file}",
        *TINY,
        *fields,
    ]


def test_train_evaluate_generate(tmp_path: pathlib.Path, text_file: pathlib.Path) -> None:
    workdir = tmp_path / "run"
    arguments = train_arguments(workdir, text_file, num_steps=4, checkpoint_every=2, eval_every=2, sample_tokens=5)
    done = call_by_hand(EXPERIMENTS / "train.py", *arguments, "--format=json")
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert (outcome["step"], outcome["interrupted"]) == (4, False)
    assert "made 8 fake devices" in done.stderr
    *_, sampling, goodput, summary, label = done.stderr.splitlines()
    assert sampling == "Sampling 5 tokens …"
    assert goodput.startswith(f"Goodput {outcome['goodput']:.1%} of ")
    assert f"metrics.jsonl, checkpoints/ in {workdir}" in summary
    assert label == "Sample after 4 steps (temperature 0.7):"
    assert done.stdout.startswith(outcome["sample"] + "\n")
    files = {"config.json", "data.json", "schedule.csv", "metrics.jsonl", "goodput.jsonl", "checkpoints", "tensorboard"}
    assert files == {p.name for p in workdir.glob("[!.]*")}
    assert steps(workdir) == [1, 2, 2, 3, 4, 4]
    assert list((workdir / "tensorboard").glob("events.*"))

    scores = json.loads(call("evaluate", f"--workdir={workdir}").stdout.splitlines()[-1])
    assert scores["step"] == 4
    assert scores["eval_loss"] == pytest.approx(outcome["eval_loss"], rel=1e-6)
    other = call("evaluate", f"--workdir={workdir}", "--config.mesh.data=1", "--config.mesh.pipe=1").stdout
    assert json.loads(other.splitlines()[-1])["eval_loss"] == pytest.approx(scores["eval_loss"], rel=1e-5)

    once = call("generate", f"--workdir={workdir}", "--prompt=def ", "--num_tokens=8", "--top_k=5").stdout
    again = call("generate", f"--workdir={workdir}", "--prompt=def ", "--num_tokens=8", "--top_k=5", "--format=json")
    assert once.startswith("def ")
    assert json.loads(again.stdout)["text"] == once.removeprefix("def ").removesuffix("\n")


def test_compile_tells_of_memory_and_reads_no_data() -> None:
    fields = {"data.source": "tokens:/no/such/file", "model.num_layers": 2, "mesh.pipe": 2, "pipeline.schedule": "1f1b"}
    fields |= {"pipeline.num_chunks": 1, "pipeline.num_microbatches": 2}
    overrides = [f"--config.{name}={value}" for name, value in fields.items()]
    arguments = [f"--config={ROOT}/configs/gpt_tiny.py", *overrides]
    facts = json.loads(call("compile", *arguments, "--format=json").stdout.splitlines()[-1])
    assert (facts["topology"], facts["num_devices"], facts["num_stages"], facts["num_ticks"]) == ("cpu", 8, 2, 4)
    sizes = ("argument_bytes", "output_bytes", "temp_bytes", "alias_bytes", "peak_bytes")
    assert all(facts[name] > 0 for name in (*sizes, "trace_s", "compile_s"))
    unused = "--config.pipeline.stash_memory=host", "--config.pipeline.recompute=masks"
    text = call("compile", *arguments, *unused).stdout
    assert "\npipeline.stash_memory=host changes nothing with " in text
    assert "\nmasks in pipeline.recompute=masks changes nothing with model.dropout=0" in text
    assert "schedule 1f1b: 2 stages, 2 microbatches of 4, 4 ticks" in text
    assert f"{mib(facts['temp_bytes'])} MiB" in text
    assert (facts["fits"], facts["needed_bytes"]) == (None, facts["peak_bytes"])
    assert {"collective-permute", "all-reduce"} <= {each["kind"] for each in facts["collectives"]}
    assert "whether it fits is not known" in text
    hops = 2 * facts["num_ticks"]
    assert re.search(rf"collective-permute +pipe +{hops} .* no\n", text)
    assert "'gpu' is not known" in call("compile", *arguments, "--topology=gpu", status=2).stderr
    two = "--config.mesh.data=1", "--config.mesh.tensor=1"
    no_slice = call("compile", *arguments, "--topology=tpu_v5e", *two, status=2).stderr
    assert "2 devices of tpu_v5e are no cluster that can be compiled for" in no_slice


@pytest.mark.long
@pytest.mark.skipif(num_cores() < 2, reason="the comparison needs two cores")
def test_throughput_looks_for_no_tpu(text_file: pathlib.Path) -> None:
    sizes = ["--config.model.num_layers=2", "--config.model.hidden_size=32", "--config.model.seq_len=32"]
    arguments = [*sizes, f"--config.data.source=text:{text_file}", "--rounds=1", "--steps=1", "--microbatches=2"]
    line = [sys.executable, "-m", "experiments.benchmarks.throughput", *arguments]
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # of the drivers, tests/test_against.py checks it
    assert "\npipe=2 is " in done.stdout


@pytest.mark.parametrize(
    ("kilobytes", "fields", "number", "message"),
    [
        pytest.param(
            *(8, {"num_steps": 1000}, 6, "Cannot write to {}/metrics.jsonl: File too large. Make room"),
            marks=pytest.mark.long,
        ),
        (16, {"num_steps": 4, "checkpoint_every": 2}, 8, "Cannot write a checkpoint under {}/checkpoints: "),  # twice
    ],
    ids=["metrics", "checkpoint"],
)
def test_full_disk(
    kilobytes: int, fields: dict[str, int], number: int, message: str, tmp_path: pathlib.Path, text_file: pathlib.Path
) -> None:
    # Of each file, which is as good as a full disk; the compilation cache would be one that warns.
    flags = f"export XLA_FLAGS='{os.environ['XLA_FLAGS']}'"
    limited = f'{flags}; unset JAX_COMPILATION_CACHE_DIR; ulimit -f {kilobytes}; exec "$@"'
    other = "--config.train.compilation_cache=", "--config.optimizer.warmup_steps=2"  # no longer than the run
    arguments = [*train_arguments(tmp_path, text_file, **fields), *other]
    done = call_by_hand(EXPERIMENTS / "train.py", *arguments, status=1, shell=limited)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("step ")]
    assert len(lines) == number, done.stderr
    assert message.format(tmp_path) in lines[-1]


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGTERM, marks=pytest.mark.long), pytest.param(signal.SIGINT, marks=pytest.mark.long), 9],
)
def test_stopped_and_resumed(number: int, tmp_path: pathlib.Path, text_file: pathlib.Path) -> None:
    arguments = train_arguments(tmp_path, text_file, num_steps=100_000, checkpoint_every=20)
    with started("train", *arguments) as running:
        deadline = time.monotonic() + 120
        while max(steps(tmp_path), default=0) < 30 and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(running.process.pid, number)
        status, _, text = running.wait(60)
    reached = max(steps(tmp_path))
    assert reached >= 30
    if number == signal.SIGKILL:
        assert status == -signal.SIGKILL
    else:
        assert status == 128 + number
        assert f"{signal.Signals(number).name}: stopping after the running step" in text
        assert f"Stopped by {signal.Signals(number).name} at step {reached}" in text
        assert "the same command goes on from there" in text
    resumed = call("train", *arguments, f"--config.train.num_steps={reached + 3}").stderr
    assert f"Resuming from step {reached}" in resumed or number == signal.SIGKILL
    assert steps(tmp_path) == list(range(1, reached + 4))


@pytest.mark.parametrize(
    ("binary", "arguments", "status", "message"),
    [
        ("train", ["--config.mesh.tensor=3"], 2, "model.num_heads=4 is not a multiple of mesh.tensor=3"),
        ("train", ["--config.model.hiden_size=3"], 2, "Did you mean 'hidden_size'?"),
        (
            "train",
            ["--config.data.global_batch_size=7"],
            2,
            "data.global_batch_size=7 is not a multiple of mesh.data=2",
        ),
        ("train", ["--config.data.source=text:/nowhere"], 2, "/nowhere"),
        (
            "train",
            ["--config.mesh.pipe=4"],
            2,
            "num_layers=4 is less than the 8 stages of mesh.pipe=4",
        ),
        ("train", ["--config.pipeline.num_microbatches=1"], 2, "the microbatches must be a multiple of the ranks"),
        ("train", ["--config.pipeline.schedule=1f2b"], 2, "there is no schedule '1f2b'. Did you mean '1f1b'?"),
        (
            "train",
            ["--config.pipeline.layers_per_stage=2,2"],
            2,
            "has 2 stages and 4 layers; the schedule has 4 stages",
        ),
        ("train", ["--config.optimizer.name=adamw2"], 2, "Did you mean 'adamw'?"),
        ("train", ["--config.pipeline.stash_memory=host"], 2, "CPU devices have one memory"),
        ("train", ["--config.optimizer.offload=true"], 2, "optimizer.offload=true: CPU devices have one memory"),
        ("evaluate", [], 1, "is not the directory of a training run"),
        ("generate", ["--top_p=0"], 2, "top_p=0"),
        ("generate", ["--top_k=99999999999999999999"], 2, "top_k=99999999999999999999 must be at least 0 and below"),
    ],
)
def test_mistakes(binary: str, arguments: list[str], status: int, message: str, tmp_path: pathlib.Path) -> None:
    config = [f"--config={ROOT}/configs/gpt_tiny.py"] if binary == "train" else []
    workdir = tmp_path / "none"
    done = call(binary, *config, f"--workdir={workdir}", *arguments, status=status)
    assert message in done.stderr
    assert len(done.stderr.splitlines()) <= 4
    assert not workdir.exists()


def run_block(
    page: str, marker: str, tmp_path: pathlib.Path, more: dict[str, list[str]]
) -> list[subprocess.CompletedProcess]:
    """Runs the commands of a block of a page of docs/ in a folder of the test's own.

    `more` has further arguments for the commands that have a key in their line; the first key counts.
    """
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    outputs = []
    for line in text.split(f"<!-- {marker} -->\n```sh\n")[1].split("```")[0].splitlines():
        python, binary, *arguments = shlex.split(line.replace("/tmp/", f"{tmp_path}/"))
        assert python == ".venv/bin/python"
        added = next((value for key, value in more.items() if key in line), [])
        arguments = [re.sub("=(configs/|fiddlex$)", rf"={ROOT}/\1", argument) for argument in arguments]
        outputs.append(call(pathlib.Path(binary).stem, *arguments, *added))
    return outputs


SMALL = ["--config.model.num_layers=4", "--config.model.hidden_size=32", "--config.train.log_every=2"]
SMALL += ["--config.train.eval_every=2", "--config.train.num_steps=4", "--config.train.checkpoint_every=2"]


@pytest.mark.long
def test_the_commands_for_own_data_and_weights(tmp_path: pathlib.Path) -> None:
    few = ["--config.train.num_steps=2", "--config.optimizer.warmup_steps=1", "--config.model.seq_len=64"]
    few.append("--config.data.eval_batches=2")
    more = {"gpt_tiny.py": SMALL, "huggingface.py": few, "generate.py": ["--format=json", "--num_tokens=20"]}
    prepared, trained, converted, tuned, generated = run_block("start_text.md", "own-commands", tmp_path, more)
    assert "--config.data.source=megatron:" in prepared.stdout + prepared.stderr
    assert "loss" in trained.stderr
    assert "has the weights of step 4" in converted.stderr
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        p.name for p in (tmp_path / "own_folder").iterdir()
    }
    assert "loss" in tuned.stderr
    record = json.loads(generated.stdout.splitlines()[-1])
    assert record["step"] == 2
    assert record["samples"][0]["num_tokens"] == 20 or record["samples"][0]["end"] == "document"
    assert record["tokens_per_second"] > 0


@pytest.mark.long
def test_the_bert_commands(tmp_path: pathlib.Path) -> None:
    """As they stand, but in a folder of the test's own, with small models and few steps."""
    moved = [f"--config.data.{field}=jsonl:{tmp_path}/swaps/{name}.jsonl" for field, name in SIDES.items()]
    more = {
        "bert_tiny.py": [*SMALL, "--config.data.eval_batches=2"],
        "bert_swaps.py": [*SMALL, *moved, f"--config.train.init_from={tmp_path}/bert_tiny"],
    }
    pretrained, task, tuned, evaluated = run_block("bert.md", "bert-commands", tmp_path, more)
    assert "masked accuracy" in pretrained.stderr
    assert "lines to train on and 1," in task.stdout
    assert "a bag of words is right for 5" in task.stdout
    assert "The run starts from these weights; new: head.label." in tuned.stderr
    assert (tmp_path / "bert_swaps/best").is_dir()
    assert re.search(r"\nheld out: jsonl:.*eval\.jsonl: 1,\d+ lines, 0 cut to .*; always answering '", evaluated.stderr)
    record = json.loads(evaluated.stdout.splitlines()[-1])
    assert record["eval_accuracy_low"] < record["eval_accuracy"] < record["eval_accuracy_high"]
    assert record["eval_examples"] > 1000
