"""The comparison with other systems: the protocol with drivers of a few lines, mistakes, and PyTorch where it is."""

import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterable

import pytest

from experiments.benchmarks.comparison import compare, first_losses, table
from experiments.benchmarks.known_systems import Asked, ask, pairs
from experiments.benchmarks.systems import FIDDLEX_DRIVER
from fiddlex.config import Config
from fiddlex.errors import ConfigError, FiddlexError
from tests.programs import ROOT, call
from third_party.protocol import Job

CONFIG = [
    f"--config={ROOT}/configs/gpt_tiny.py",
    "--config.model.num_layers=4",
    "--config.model.hidden_size=32",
    "--config.model.seq_len=32",
    "--config.mesh.data=1",
    "--config.mesh.pipe=1",
    "--config.mesh.tensor=1",
    "--config.pipeline.num_chunks=1",
    "--config.pipeline.schedule=1f1b",
    "--config.optimizer.weight_decay=0.1",
    "--config.optimizer.clip_norm=0.5",
]
PYTHON = os.environ.get("FIDDLEX_TORCH_PYTHON", sys.executable)

FAKE = """
import pathlib, sys, time
from third_party.protocol import Training, serve

def start(job):
    print("a library greets")  # must not be taken for an answer
    total = 0
    def train(steps):
        nonlocal total
        total += steps
        if total > {dies_after}:
            sys.exit("out of\\ncheese")
        with open({turns!r}, "a") as turns:
            turns.write("{name} " + str(steps) + "\\n")
        time.sleep(steps * {step_s})
        return [float(job.options.get("loss", 3 - step)) for step in range(steps)]
    return Training(train, "fake 1", lambda: 2.0 * total, {differs!r}, lambda: 10**9 * total)

serve(start)
"""


def fake(
    folder: pathlib.Path,
    name: str,
    *,
    step_s: float = 0.001,
    dies_after: float = 1e9,
    differs: str = "",
    **options: str,
) -> Asked:
    """A driver that sleeps, and notes its turns in the folder."""
    text = FAKE.format(turns=str(folder / "turns"), name=name, step_s=step_s, dies_after=dies_after, differs=differs)
    return Asked(name, (sys.executable, "-c", text), {"options": options})


@pytest.fixture
def job() -> Job:
    return Job(config=json.loads(Config().to_json()), cores=sorted(os.sched_getaffinity(0))[:1], check_steps=2)


def test_systems_take_turns_after_their_losses_are_compared(tmp_path: pathlib.Path, job: Job) -> None:
    asked = [fake(tmp_path, "quick"), fake(tmp_path, "slow", step_s=0.01), fake(tmp_path, "other", differs="it is new")]
    asked[2].own["options"]["loss"] = "7"
    quick, slow, other = results = compare(asked, job, rounds=3, steps=4, tolerance=1e-4)
    checks, turns = ["quick 2", "slow 2", "other 2"], ["quick 4", "slow 4", "other 4"]
    assert (tmp_path / "turns").read_text(encoding="utf-8").splitlines() == checks + 4 * turns
    assert quick.losses == slow.losses == [3, 2]
    assert all(times[1] == pytest.approx(2) for times in slow.times)  # CPU seconds of a step
    record = slow.to_record(tokens_per_step=30)
    assert 0.01 <= record["quartiles_s"][0] <= record["step_time_s"] <= record["quartiles_s"][1]
    assert record["tokens_per_second"] == pytest.approx(30 / record["step_time_s"])
    assert slow.peak_bytes == record["peak_bytes"] == 10**9 * (2 + 4 * 4)
    assert len(slow.speedups) == 3
    assert slow.speedups == [theirs[0] / ours[0] for ours, theirs in zip(quick.times, slow.times, strict=True)]
    text = table(results, 30)
    assert [line.split(" | ")[0] for line in text.splitlines()[2:5]] == ["| quick", "| slow", "| other *"]
    assert "quick's speed ÷ this system's" in text
    assert all(line.endswith("| 18.00 |") for line in text.splitlines()[2:5])
    assert "\n* other does not train the same: it is new.\nfake 1" in text.replace("\\*", "*")
    assert other.losses == [7, 7]


@pytest.mark.parametrize(("loss", "told"), [("3.01", "3.01 (0.33% apart)"), ("nan", "nan")])
def test_losses_that_differ_are_an_error(tmp_path: pathlib.Path, job: Job, loss: str, told: str) -> None:
    asked = [fake(tmp_path, "one", loss="3"), fake(tmp_path, "two", loss=loss)]
    with pytest.raises(FiddlexError) as raised:
        compare(asked, job, rounds=2, steps=1, tolerance=0.003)
    message = f"step 1: the loss of one is 3 and that of two {told}; the tolerance is a difference of 0.003, relative"
    assert message in str(raised.value)
    if loss == "3.01":
        compare(asked, job, rounds=2, steps=1, tolerance=0.004)


def test_losses_are_compared_with_those_of_another_run(tmp_path: pathlib.Path, job: Job) -> None:
    expected = first_losses(fake(tmp_path, "exact", loss="3"), job)
    assert expected == ("exact", [3, 3])
    asked = [fake(tmp_path, "one", loss="3.01"), fake(tmp_path, "two", loss="2.99")]
    compare(asked, job, rounds=2, steps=1, tolerance=0.004, expected=expected)
    asked[1] = fake(tmp_path, "two", loss="2.98")
    with pytest.raises(FiddlexError, match=r"the loss of exact is 3 and that of two 2\.98 \(0\.67% apart\)"):
        compare(
            [asked[0], fake(tmp_path, "two", loss="2.98")], job, rounds=2, steps=1, tolerance=0.004, expected=expected
        )


def test_a_driver_that_dies_is_told_with_its_last_words(tmp_path: pathlib.Path, job: Job) -> None:
    asked = [fake(tmp_path, "one"), fake(tmp_path, "two", dies_after=5)]
    with pytest.raises(
        FiddlexError, match=r"^two ended with status 1\. The last that it wrote:\n(.*\n)*out of\ncheese"
    ):
        compare(asked, job, rounds=2, steps=2, tolerance=1e-4)
    asked[1] = Asked("two", (sys.executable, "-c", "print('hello')"))
    with pytest.raises(FiddlexError, match=r"^two answered 'hello', which is not JSON"):
        compare(asked, job, rounds=2, steps=2, tolerance=1e-4)


def test_mistakes_are_told_before_anything_is_computed(tmp_path: pathlib.Path) -> None:
    bare = tmp_path / "python"  # one that has no package
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n', encoding="utf-8")
    bare.chmod(0o700)
    mistakes: dict[Iterable[str], str] = {
        ("--against=tensorflow",): "--against=tensorflow: there is no 'tensorflow'. Use one of fiddlex, torch, ",
        ("--against=",): "--against=: name some of fiddlex, torch, ",
        ("--against=torch:layers=3",): "write torch:OPTION=VALUE. The options of torch are microbatches.",
        ("--against=fiddlex:mesh.pip=2",): "config.mesh has no field 'pip'. Did you mean 'pipe'?",
        ("--against=torch", f"--python=torch={bare}"): (
            f"{bare} has no torch and no numpy. Install what it needs in an environment of its own:\n"
            "  python -m venv ENV && ENV/bin/pip install torch==2.13.0 numpy\n"
            "then add --python=torch=ENV/bin/python."
        ),
        ("--against=torch", "--python=torch=/no/python"): "/no/python does not start (No such file or directory).",
        ("--against=fiddlex", "--config.model.dropout=0.1"): "model.dropout=0.1 with --against: the drivers of other",
        ("--against=fiddlex", "--config.optimizer.name=lion"): "optimizer.name=lion with --against",
        ("--against=fiddlex", "--config.model.dtype=float16"): "model.dtype='float16' is not one of float32, bfloat16.",
        ("--against=torch-1f1b", "--device=cuda"): (
            "--against=torch-1f1b with --device=cuda: its driver trains on cpu alone. Leave it out, or use one "
            "of torch, torch-compile, nanogpt, "
        ),
        ("--against=spectrax-1f1b", "--config.model.dtype=bfloat16"): (
            "--against=spectrax-1f1b with model.dtype=bfloat16: its driver computes in float32 alone."
        ),
        ("--against=fiddlex", "--cores=4711"): "--cores=4711: 4711 is not among the usable cores",
    }
    for arguments, message in mistakes.items():
        assert message in call("benchmark", *CONFIG, *arguments, status=2).stderr
    with pytest.raises(ConfigError, match="--python=jax=x: write NAME=PATH, where NAME is one of torch"):
        pairs("python", ["jax=x"], ["torch"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("torch:microbatches=0", "microbatches=0 must be at least 1"),
        ("torch:microbatches=-1", "microbatches=-1: '-1' is not a whole number. Use one from 1 on."),
        (
            "torch:microbatches=3",
            "data.global_batch_size=8 is not a multiple of microbatches=3: drivers give all microbatches",
        ),
        ("torch:microbatches=1 2", "microbatches=1 2: '1 2' is not a whole number. Use one from 1 on."),
        ("torch-1f1b:processes=x", "processes=x: 'x' is not a whole number."),
        ("torch-1f1b:processes=0", "processes=0 must be at least 1"),
        ("torch-1f1b:processes=5", "processes=5: each runs a layer at least, and model.num_layers is 4. Use 4 or"),
        ("torch-1f1b:layers=2+x", "layers=x: 'x' is not a whole number."),
        ("torch-1f1b:layers=4+0", "layers=0 must be at least 1"),
        ("torch-1f1b:compile=maybe", "compile='maybe' is not one of yes, no."),
    ],
)
def test_options_have_values_that_drivers_take(text: str, message: str) -> None:
    config = Config()
    config.data.global_batch_size = 8
    with pytest.raises(ConfigError, match=f"^--against={re.escape(text)}: {re.escape(message)}"):
        ask(text, config, pythons={}, clones={})


def test_the_path_of_a_python_is_relative_to_the_current_folder(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = tmp_path / "ENV" / "bin" / "python"
    environment.parent.mkdir(parents=True)
    environment.write_text("#!/bin/sh\n", encoding="utf-8")  # it lacks no package
    environment.chmod(0o700)
    monkeypatch.chdir(tmp_path)
    assert ask("torch", Config(), pythons={"torch": "ENV/bin/python"}, clones={}).command[0] == str(environment)


@pytest.mark.long
def test_fiddlex_is_compared_with_itself_on_another_layout() -> None:
    other = "fiddlex:mesh.pipe=2:pipeline.num_microbatches=4"
    arguments = [f"--against={other}", "--rounds=2", "--steps=1", "--check_steps=3", "--format=json"]
    facts = json.loads(call("benchmark", *CONFIG, *arguments).stdout.splitlines()[-1])
    assert [system["name"] for system in facts["systems"]] == ["fiddlex", other]
    first, second = (system["losses"] for system in facts["systems"])
    assert first == pytest.approx(second, rel=1e-5)
    assert len(first) == 3


@pytest.mark.long
def test_the_driver_of_fiddlex_looks_for_no_tpu(tmp_path: pathlib.Path, tiny_config: Config) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps({"config": json.loads(tiny_config.to_json()), "cores": [0]}), encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    line = [sys.executable, "-m", FIDDLEX_DRIVER, str(path)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment, input="1\n")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert [sorted(json.loads(answer)) for answer in done.stdout.splitlines()] == [
        ["differs", "losses", "versions"],
        ["cpu_seconds", "peak_bytes", "seconds"],
    ]


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 1e-3)])
def test_pytorch_trains_the_same_model(dtype: str, tolerance: float) -> None:
    find = "import importlib.util, sys; sys.exit(None in map(importlib.util.find_spec, ['torch', 'numpy']))"
    if subprocess.run([PYTHON, "-c", find], cwd="/").returncode:
        pytest.skip(f"{PYTHON} has no torch; FIDDLEX_TORCH_PYTHON names a Python that has")
    names = "torch,torch:microbatches=1,torch-gpipe,torch-1f1b:layers=3+1,torch-interleaved,torch-zbv"
    arguments = [f"--against={names}", f"--python=torch={PYTHON}", "--config.pipeline.num_microbatches=4"]
    arguments += [f"--config.model.dtype={dtype}", f"--tolerance={tolerance}"]
    arguments += ["--rounds=2", "--steps=1", "--format=json"]
    facts = call("benchmark", *CONFIG, *arguments, timeout_s=1200)  # PyTorch starts six times, one after another
    assert len(json.loads(facts.stdout.splitlines()[-1])["systems"]) == 7
