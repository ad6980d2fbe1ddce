"""Several processes share one tokenization, one workdir and one set of checkpoints, or say which of them does not."""

import json
import pathlib
import signal
import socket
import time
from typing import Any

import jax
import numpy as np
import pytest

from fiddlex.config import Config
from fiddlex.config.overrides import replaced
from fiddlex.train import loop
from fiddlex.train.trainer import load_trainer
from tests.cluster.pods import pod, run_pod
from tests.cluster.test_processes import as_flags, make_config, numbers, wait_for_steps

FAULTY = pathlib.Path(__file__).with_name("faulty_train.py")
HOST = socket.gethostname()


def flags_of(config_file: pathlib.Path, config: Config, workdir: pathlib.Path) -> list[str]:
    return [f"--config={config_file}", *as_flags(config), f"--workdir={workdir}"]


def fault(name: str, *, rank: int = 1, of: int = 2) -> list[list[str]]:
    return [[f"--fault={name}"] if each == rank else [] for each in range(of)]


@pytest.fixture
def config(tiny_config: Config) -> Config:
    return make_config(tiny_config, "2x1x2", {"train.eval_every": 4})


@pytest.mark.parametrize("cache", ["", pytest.param("of its own", marks=pytest.mark.long)])
def test_the_first_process_tokenizes_for_all(
    cache: str, config: Config, tmp_path: pathlib.Path, config_file: pathlib.Path
) -> None:
    loop.train(config, tmp_path / "one")
    assert not (tmp_path / "one" / "tokens").exists()
    if cache:
        config.data.cache = str(tmp_path / cache)
    folder = tmp_path / (cache or "pod/tokens")
    flags = flags_of(config_file, config, tmp_path / "pod")
    ended = run_pod(2, 2, FAULTY, *flags, extra=fault("tokenizes_nothing"))
    assert [each.returncode for each in ended] == [0, 0], [each.stderr for each in ended]
    assert f"the tokens will be in {folder}/" in ended[0].stderr
    assert len(list(folder.iterdir())) == 1
    np.testing.assert_allclose(numbers(tmp_path / "pod"), numbers(tmp_path / "one"), rtol=1e-6)
    if cache:  # another run, of one process, takes the same file
        loop.train(config, tmp_path / "again")
        assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize(
    ("faults", "status", "message"),
    [
        (
            [["--fault=sleeps_before_tokenizing"], ["--fault=is_impatient"]],
            1,
            "This process waits for rank 0 to read and tokenize text:",
        ),
        (
            fault("has_no_workdir"),
            1,
            f"is not shared by all hosts: rank 0 ({HOST}) has written a file there, and rank 1 ({HOST}) cannot read it",
        ),
        (
            [[], ["--config.data.tokenizer={folder}/other.json"]],
            2,
            "the content of data.tokenizer is 'bytes' on rank 0 and 'No such file or directory' on rank 1",
        ),
    ],
    ids=["time-out", "workdir", "tokenizer"],
)
def test_what_is_not_shared_is_told_once(
    faults: list[list[str]],
    status: int,
    message: str,
    config: Config,
    tmp_path: pathlib.Path,
    config_file: pathlib.Path,
) -> None:
    extra = [[each.format(folder=tmp_path) for each in of_rank] for of_rank in faults]
    ended = run_pod(2, 2, FAULTY, *flags_of(config_file, config, tmp_path / "pod"), extra=extra)
    assert [each.returncode for each in ended] == [status, status], [each.stderr for each in ended]
    assert "".join(each.stderr for each in ended).count(message) == 1, [each.stderr for each in ended]


def test_other_heldout_data_on_one_rank(config: Config, tmp_path: pathlib.Path, config_file: pathlib.Path) -> None:
    for name in ("a", "b"):
        np.full(200, ord(name), "<u2").tofile(tmp_path / f"{name}.bin")
    (tmp_path / "rank0").symlink_to(tmp_path / "a.bin")
    (tmp_path / "rank1").symlink_to(tmp_path / "b.bin")
    script = tmp_path / "own_file.py"
    script.write_text(
        "import sys\n"
        "from fiddlex.data import corpus\n"
        "from fiddlex.commands.train import main\n"
        "from fiddlex.terminal.command_line import run\n"
        "rank = next(each for each in sys.argv if each.startswith('--process_id='))[-1]\n"
        "opened = corpus.open_token_file\n"
        "corpus.open_token_file = lambda path, **fields: opened(path.with_name(path.name + rank), **fields)\n"
        "run(main)\n"
    )
    config.data.eval_source = f"tokens:{tmp_path / 'rank'}"
    ended = run_pod(2, 2, script, *flags_of(config_file, config, tmp_path / "pod"))
    assert [each.returncode for each in ended] == [2, 2], [each.stderr for each in ended]
    said = "".join(each.stderr for each in ended)
    assert said.count("the fingerprint of the held-out data (data.eval_source") == 1
    assert "on rank 0 and '200-" in said


@pytest.mark.long
def test_a_checkpoint_that_one_rank_cannot_read_is_passed_over_by_all(
    config: Config,
    tmp_path: pathlib.Path,
    config_file: pathlib.Path,
) -> None:
    flags = flags_of(config_file, config, tmp_path / "pod")
    for each in run_pod(2, 2, "train", *flags):
        assert each.returncode == 0, each.stderr
    ended = run_pod(2, 2, FAULTY, *flags, extra=fault("cannot_read_step_4"))
    assert [each.returncode for each in ended] == [0, 0], [each.stderr for each in ended]
    said = "".join(each.stderr for each in ended)
    assert said.count("The checkpoint of step 4 cannot be read and is passed over") == 1
    assert f"on rank 1 ({HOST}): " in said
    assert "Resuming from step 2" in said
    assert [path.name[0] for path in (tmp_path / "pod" / "damaged_checkpoints").iterdir()] == ["4"]
    # The files of one process are cut: all are told the same.
    for path in (tmp_path / "pod/checkpoints/4/weights").glob("ocdbt.process_1/d/*"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    ended = run_pod(2, 2, "train", *flags)
    assert [each.returncode for each in ended] == [0, 0], [each.stderr for each in ended]
    assert "".join(each.stderr for each in ended).count("The checkpoint of step 4 cannot be read") == 1
    assert "Resuming from step 2" in ended[0].stderr


@pytest.mark.long
def test_a_full_disk_on_one_rank_ends_all_and_leaves_earlier_checkpoints(
    config: Config, tmp_path: pathlib.Path, config_file: pathlib.Path
) -> None:
    config = replaced(config, {"train.num_steps": 8, "train.eval_every": 0, "model.hidden_size": 128})
    flags = flags_of(config_file, config, tmp_path / "pod")
    started_s = time.monotonic()
    ended = run_pod(2, 2, FAULTY, *flags, extra=fault("full_disk"))
    assert [each.returncode for each in ended] == [1, 1], [each.stderr for each in ended]
    assert time.monotonic() - started_s < 90
    said = "".join(each.stderr for each in ended)
    assert said.count("Cannot write a checkpoint under") == 1
    assert "Earlier checkpoints are intact" in said
    (first, _) = run_pod(2, 2, "train", *flags)
    assert first.returncode == 0, first.stderr
    assert "Resuming from step " in first.stderr


@pytest.mark.long
def test_two_runs_in_one_workdir(config: Config, tmp_path: pathlib.Path, config_file: pathlib.Path) -> None:
    config = replaced(config, {"train.num_steps": 10**6, "train.eval_every": 0})
    flags = flags_of(config_file, config, tmp_path / "pod")
    with pod(2, 2, "train", *flags) as running:
        wait_for_steps(tmp_path / "pod")
        ended = run_pod(2, 2, "train", *flags)
        assert [each.returncode for each in ended] == [2, 2]
        assert "".join(each.stderr for each in ended).count("Another process is training in --workdir=") == 1
        for each in running:
            each.process.kill()
        assert [each.wait().returncode for each in running] == [-signal.SIGKILL] * 2
    steps = as_flags(replaced(config, {"train.num_steps": numbers(tmp_path / "pod")[-1][0] + 2}))
    ended = run_pod(2, 2, "train", f"--config={config_file}", *steps, f"--workdir={tmp_path / 'pod'}")
    assert [each.returncode for each in ended] == [0, 0], [
        each.stderr for each in ended
    ]  # the lock went with its owner


MEMORY = """
import json, pathlib, re, sys
from fiddlex.cluster import processes
from fiddlex.config import DataConfig
from fiddlex.terminal.ending import finished
from fiddlex.data import load_corpus

address, rank, folder = sys.argv[1].partition("=")[2], int(sys.argv[3].partition("=")[2]), pathlib.Path(__file__).parent


def anonymous() -> int:
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])


processes.join(address, 2, rank)
before = anonymous()
config = DataConfig(source=f"text:{folder / 'text.txt'}")
corpus = load_corpus(config, vocab_size=256, seq_len=4, shared=folder / "tokens")
total = int(corpus.train.tokens.sum(dtype=int))
(folder / f"{rank}.json").write_text(json.dumps([len(corpus.train), total, anonymous() - before]))
finished(0)
"""


def test_the_second_process_does_not_hold_the_tokens(tmp_path: pathlib.Path) -> None:
    (tmp_path / "memory.py").write_text(MEMORY)
    (tmp_path / "text.txt").write_text("some text " * 6_000_000)
    for each in run_pod(2, 1, tmp_path / "memory.py"):
        assert each.returncode == 0, each.stderr
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first[:2] == second[:2]
    assert second[2] < 5_000_000 < second[0]  # bytes of anonymous memory, and tokens of a byte each


def test_convert_is_one_process(tmp_path: pathlib.Path) -> None:
    ended = run_pod(2, 1, "convert", "--source=hf:/nowhere", f"--target={tmp_path / 'made'}")
    assert [each.returncode for each in ended] == [2, 2]
    assert "".join(each.stderr for each in ended).count("convert runs as one process, and 2 were started") == 1


def weights(workdir: pathlib.Path) -> list[Any]:
    return jax.tree.leaves(load_trainer(workdir).weights())


@pytest.mark.long
@pytest.mark.parametrize("source", ["workdir", "hf"])
def test_weights_to_start_from_are_those_of_one_process(
    source: str, config: Config, tmp_path: pathlib.Path, config_file: pathlib.Path
) -> None:
    from fiddlex.train.run.transfer.conversion import export_workdir

    config.model.vocab_size = 256
    loop.train(config, tmp_path / "first")
    start = str(tmp_path / "first")
    if source == "hf":
        export_workdir(tmp_path / "first", tmp_path / "folder", "")
        start = f"hf:{tmp_path / 'folder'}"
        config.data.tokenizer = str(tmp_path / "folder" / "tokenizer.json")
    config = replaced(config, {"train.init_from": start, "train.seed": 5, "train.num_steps": 2})
    loop.train(config, tmp_path / "one")
    for each in run_pod(2, 2, "train", *flags_of(config_file, config, tmp_path / "pod")):
        assert each.returncode == 0, each.stderr
    np.testing.assert_allclose(numbers(tmp_path / "pod"), numbers(tmp_path / "one"), rtol=1e-6)
    for one, other in zip(weights(tmp_path / "one"), weights(tmp_path / "pod"), strict=True):
        assert np.linalg.norm(one - other) <= 1e-6 * np.linalg.norm(one)


@pytest.mark.long
def test_kills_during_saves_change_nothing(config: Config, tmp_path: pathlib.Path, config_file: pathlib.Path) -> None:
    """All processes are killed at random moments of saves; the same command goes on to the same weights."""
    config = replaced(config, {"train.num_steps": 40, "train.eval_every": 0, "train.checkpoint_every": 1})
    config = replaced(config, {"model.hidden_size": 128, "optimizer.schedule": "constant"})
    random = np.random.default_rng(0)
    for each in run_pod(2, 2, "train", *flags_of(config_file, config, tmp_path / "whole")):
        assert each.returncode == 0, each.stderr
    killed, flags, checkpoints = 0, flags_of(config_file, config, tmp_path / "pod"), tmp_path / "pod" / "checkpoints"
    for _ in range(6):
        before = steps_of(checkpoints)
        with pod(2, 2, "train", *flags) as running:
            deadline = time.monotonic() + 120
            while not steps_of(checkpoints) - before and time.monotonic() < deadline:
                time.sleep(0.01)
            while not list(checkpoints.glob("*.orbax-checkpoint-tmp*")) and running[0].process.is_alive():
                time.sleep(0.0005)
            time.sleep(float(random.uniform(0, 0.05)))
            killed += bool(list(checkpoints.glob("*.orbax-checkpoint-tmp*")))
            for each in running:
                each.process.kill()
    assert killed  # at least one in the middle of a save
    ended = run_pod(2, 2, "train", *flags)
    assert [each.returncode for each in ended] == [0, 0], [each.stderr for each in ended]
    assert "Resuming from step" in ended[0].stderr
    assert "cannot be read" not in ended[0].stderr
    for one, other in zip(weights(tmp_path / "whole"), weights(tmp_path / "pod"), strict=True):
        np.testing.assert_array_equal(one, other)
    assert json.loads((tmp_path / "pod" / "config.json").read_text())["train"]["num_steps"] == 40


def steps_of(checkpoints: pathlib.Path) -> set[str]:
    return {path.name for path in checkpoints.iterdir() if path.name.isdigit()} if checkpoints.is_dir() else set()


@pytest.mark.long
@pytest.mark.parametrize("action", ["skip", "rollback"])
def test_all_processes_skip_or_go_back_from_a_bad_batch(
    action: str, tiny_config: Config, tmp_path: pathlib.Path, config_file: pathlib.Path
) -> None:
    fields = {"train.num_steps": 10, "train.eval_every": 0, "train.checkpoint_every": 2, "train.on_nonfinite": action}
    config = make_config(tiny_config, "2x1x2", fields)
    bad = ["--fault=poisons_batch_6"]
    for name, number in (("one", 1), ("pod", 2)):
        flags = flags_of(config_file, config, tmp_path / name)
        ended = run_pod(number, 4 // number, FAULTY, *flags, extra=[bad] * number)
        assert [each.returncode for each in ended] == [0] * number, [each.stderr for each in ended]
        (fault,) = json.loads((tmp_path / name / "faults.json").read_text())
        assert (fault["step"], fault["batch"], fault["action"]) == (7, 6, action)
    losses = [
        [
            record["loss"]
            for record in map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
            if "loss" in record
        ]
        for name in ("one", "pod")
    ]
    assert len(losses[0]) == 10
    assert [loss is None for loss in losses[0]] == [loss is None for loss in losses[1]]
    np.testing.assert_allclose(*[[loss or 0.0 for loss in each] for each in losses], rtol=1e-6)
