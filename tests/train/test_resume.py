"""Interrupted and resumed runs give what uninterrupted ones give; damaged checkpoints are noticed; nothing is lost."""

import copy
import json
import pathlib
import re
import shutil
import signal
import threading
from typing import Any

import jax
import numpy as np
import pytest

from fiddlex.config import Config
from fiddlex.config.overrides import override
from fiddlex.errors import CheckpointError, ConfigError, DataError, NonFiniteError
from fiddlex.parallel.host_memory import HOST
from fiddlex.train import loop
from fiddlex.train.run import workdir as workdirs
from fiddlex.train.run.checkpoints.checkpoint import Checkpoints
from fiddlex.train.run.checkpoints.checksums import checksums
from fiddlex.train.run.checkpoints.file_digests import LIST
from fiddlex.train.step import blockwise
from fiddlex.train.step.feed import Feed
from fiddlex.train.trainer import Trainer, load_trainer
from tests.train.layouts import OWN


@pytest.fixture
def config(tiny_config: Config) -> Config:
    """Six steps with everything that has a state: dropout, AdamW, clipping, warm-up, ZeRO-1, microbatches."""
    tiny_config.model.dropout = 0.1
    tiny_config.mesh.data = tiny_config.mesh.tensor = 2
    tiny_config.pipeline.num_microbatches = 2
    tiny_config.optimizer.warmup_steps = 3
    tiny_config.optimizer.clip_norm = 1.0
    tiny_config.optimizer.weight_decay = 0.1
    tiny_config.train.num_steps = 6
    tiny_config.train.checkpoint_every = 2
    return tiny_config


def records(workdir: pathlib.Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl without what depends on the clock, such as the record of goodput."""
    found = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    timed = ("step_time_s", "tokens_per_second", "model_tflops_per_device", "host_time_s", "data_wait_s")
    return [{k: v for k, v in each.items() if k not in timed} for each in found if "goodput" not in each]


def final_state(workdir: pathlib.Path, config: Config) -> list[np.ndarray]:
    trainer = Trainer(config)
    with Checkpoints(workdir) as checkpoints:
        assert trainer.restore(checkpoints)
    return jax.device_get(jax.tree.leaves(trainer.state))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Where the first test that asks for a whole run leaves it for those after it."""
    return tmp_path_factory.mktemp("finished") / "whole"


@pytest.fixture
def whole_run(config: Config, finished: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """The workdir of a run of `config` from its beginning to its end; each test has its own copy."""
    if not finished.exists():
        loop.train(config, finished)
    shutil.copytree(finished, tmp_path / "whole")
    return tmp_path / "whole"


@pytest.mark.parametrize(
    "semantics",
    [
        "sync",
        pytest.param("2bw", marks=pytest.mark.long),
        pytest.param("stash", marks=pytest.mark.long),
        "sync:0.5,2bw:2,vertical_sync bfloat16",
    ],
)
def test_resume_gives_the_same_bits(semantics: str, config: Config, tmp_path: pathlib.Path) -> None:
    config.pipeline.semantics_schedule, _, dtype = semantics.partition(" ")
    config.model.dtype = dtype or "float32"
    if semantics != "sync":
        config.model.num_layers, config.mesh.pipe, config.pipeline.num_microbatches = 3, 2, 4
    workdir, whole_run = tmp_path / "parts", tmp_path / "whole"
    loop.train(config, whole_run)
    assert interrupted_run(config, workdir, after=3) == 3
    # What a kill -9 leaves behind: records that go on beyond the checkpoint, the last one cut short.
    with (workdir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": 0.0}\n{"step": 5, "lo')
    outcome = loop.train(config, workdir)
    assert (outcome.step, outcome.stopped_by) == (6, None)
    assert records(workdir) == records(whole_run)
    for resumed, whole in zip(final_state(workdir, config), final_state(whole_run, config), strict=True):
        assert resumed.tobytes() == whole.tobytes()  # NaN too, where memory holds nothing


def interrupted_run(config: Config, workdir: pathlib.Path, *, after: int) -> int:
    """Trains and sends SIGTERM while step `after` is running; returns the step it stopped at."""
    original = Trainer.dispatch

    def dispatch(self: Trainer) -> Any:
        dispatched = original(self)
        if dispatched.step == after:
            signal.raise_signal(signal.SIGTERM)
        return dispatched

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "dispatch", dispatch)
        outcome = loop.train(config, workdir)
    assert outcome.stopped_by == (signal.SIGTERM, 0)
    assert Checkpoints(workdir).steps()[-1] == outcome.step
    return outcome.step


# Layouts that a run moves through: mesh (data, pipe, tensor), schedule, chunks, microbatches, layers per stage.
CROSSINGS = {
    "sequence-parallel": [((1, 1, 4), "1f1b", 1, 4, "")],  # 257 rows of the vocabulary are padded to 260, not 258
    "pipe": [((1, 2, 2), "1f1b", 1, 4, "")],
    "there-and-back": [((1, 2, 2), "interleaved_1f1b", 2, 2, ""), ((2, 1, 2), "1f1b", 1, 2, "")],
    "uneven": [((1, 3, 2), "1f1b", 1, 4, "1,2,1"), ((2, 2, 1), "zb_v", 2, 2, ""), ((1, 2, 1), "1f1b", 1, 2, "3,1")],
    "one-uneven": [((1, 3, 2), "1f1b", 1, 4, "1,2,1")],
}


# Of the default tier: the padding of the vocabulary, the stages and the schedule change.
QUICK = {("one-uneven", "adamw", "auto")}


# Optimizer and semantics; `auto` goes over to 2bw within these six steps.
TRAINED_BY = (("adamw", "sync"), ("adafactor", "sync"), ("adamw", "2bw"), ("adamw", "auto"), ("own:adafactor", "2bw"))


@pytest.mark.parametrize(
    ("crossing", "optimizer", "semantics"),
    [
        pytest.param(*case, marks=[pytest.mark.long] * (case not in QUICK), id="-".join(case))
        for case in ((crossing, *how) for crossing in CROSSINGS for how in TRAINED_BY)
    ],
)
def test_resume_on_another_layout(
    crossing: str,
    optimizer: str,
    semantics: str,
    config: Config,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(blockwise, "MIN_FACTORED_SIZE", 16)  # so that Adafactor factors these small matrices
    config.model.num_layers, config.optimizer.name = 4, optimizer.replace("own:", f"{OWN}:")
    if semantics == "auto":
        config.pipeline.semantics_schedule, config.pipeline.switch_window = semantics, 1
        config.pipeline.switch_threshold, config.optimizer.warmup_steps = 0.9, 2
    else:
        config.pipeline.semantics = semantics
    if not optimizer.endswith("adafactor"):
        config.optimizer.epsilon = 1e-6  # see tests/train/test_layouts.py
    loop.train(config, tmp_path / "whole")
    workdir, whole_run = tmp_path / "parts", tmp_path / "whole"
    first = copy.deepcopy(config)
    interrupted_run(first, workdir, after=1)
    for step, (mesh, schedule, chunks, microbatches, layers) in enumerate(CROSSINGS[crossing], start=2):
        other = copy.deepcopy(config)
        other.mesh.data, other.mesh.pipe, other.mesh.tensor = mesh
        other.mesh.sequence_parallel = mesh[2] == 4
        other.pipeline.schedule, other.pipeline.num_chunks, other.pipeline.num_microbatches = (
            schedule,
            chunks,
            microbatches,
        )
        other.pipeline.layers_per_stage = layers
        if step <= len(CROSSINGS[crossing]):
            interrupted_run(other, workdir, after=step)
        else:
            loop.train(other, workdir)
    for resumed, whole in zip(records(workdir), records(whole_run), strict=True):
        assert resumed["step"] == whole["step"]
        if "semantics" in whole:
            assert (resumed["semantics"], resumed["semantics_from_step"]) == ("2bw", 5)
            continue
        np.testing.assert_allclose(resumed["loss"], whole["loss"], rtol=1e-5)
        np.testing.assert_allclose(resumed["grad_norm"], whole["grad_norm"], rtol=1e-5)


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("adafactor", marks=pytest.mark.long)])
def test_a_run_resumes_with_its_optimizer_on_the_host_and_back(
    optimizer: str, config: Config, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blockwise, "MIN_FACTORED_SIZE", 16)
    config.model.num_layers, config.optimizer.name = 4, optimizer
    if optimizer == "adamw":
        config.optimizer.epsilon = 1e-6
    whole = [record["loss"] for record in Trainer(config).steps(4)]
    losses, kinds = [], []
    # On the host, then there in another layout, then on the devices, then on the host with the layers' weights.
    for offload, pipe, tensor, chunks in ((True, 1, 2, 1), (True, 2, 1, 1), (False, 1, 2, 1), (True, 1, 2, 4)):
        part = copy.deepcopy(config)
        part.optimizer.offload, part.mesh.pipe, part.mesh.tensor = offload, pipe, tensor
        if chunks > 1:
            part.pipeline.schedule, part.pipeline.num_chunks = "breadth_first", chunks
            part.pipeline.weights_memory = "host"
        trainer = Trainer(part)
        with Checkpoints(tmp_path) as checkpoints:
            assert trainer.restore(checkpoints) == bool(losses)
            losses += [record["loss"] for record in trainer.steps(1)]
            trainer.save(checkpoints)
        kinds.append({x.sharding.memory_kind for x in jax.tree.leaves(trainer.state)})
    assert [HOST in kind for kind in kinds] == [True, True, False, True]
    np.testing.assert_allclose(losses, whole, rtol=1e-5)


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "empty"])
def test_damaged_checkpoint_is_passed_over_and_kept(
    damage: str, config: Config, whole_run: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    newest = whole_run / "checkpoints" / "6"
    target = max((p for p in (newest / "weights").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(target.read_bytes())
    if damage == "truncate":
        target.write_bytes(data[: len(data) // 2])
    elif damage == "flip":
        data[len(data) // 2] ^= 0x10
        target.write_bytes(data)
    elif damage == "remove":
        target.unlink()
    else:
        (newest / "meta" / "metadata").write_text("")
    before = records(whole_run)
    trainer = load_trainer(whole_run)
    assert trainer.step == 4  # the checkpoint before it; reading moves nothing
    assert newest.is_dir()
    assert loop.train(config, whole_run).step == 6
    assert "cannot be read and is passed over" in caplog.text
    assert records(whole_run) == before
    assert len(list((whole_run / "damaged_checkpoints").iterdir())) == 1


def test_a_checkpoint_under_another_steps_name_is_passed_over(
    config: Config, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer(config)
    with Checkpoints(tmp_path) as checkpoints:
        for trainer.step in (4, 6):
            trainer.save(checkpoints)
    (tmp_path / "checkpoints" / "4").rename(tmp_path / "checkpoints" / "9")
    with Checkpoints(tmp_path) as checkpoints:
        assert trainer.restore(checkpoints)
    assert trainer.step == 6
    (message,) = caplog.messages
    assert message.startswith("The checkpoint of step 9 cannot be read and is passed over")
    assert message.endswith(f"{tmp_path}/checkpoints/9: it is the checkpoint of step 4 under another name")
    assert [path.name.partition("-")[0] for path in (tmp_path / "damaged_checkpoints").iterdir()] == ["9"]


@pytest.mark.parametrize("text", ["[]", "{}", '{"step": 6}'])
def test_metadata_of_another_kind_is_told_as_damage(
    text: str, config: Config, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer(config)
    with Checkpoints(tmp_path) as checkpoints:
        for trainer.step in (4, 6):
            trainer.save(checkpoints)
    (tmp_path / "checkpoints" / "6" / "meta" / "metadata").write_text(text)
    (tmp_path / "checkpoints" / "6" / LIST).unlink()  # as in checkpoints of earlier versions
    with Checkpoints(tmp_path) as checkpoints:
        assert trainer.restore(checkpoints)
    assert trainer.step == 4
    assert "checkpoints/6: what it says of itself is not what was saved" in caplog.text


def test_no_readable_checkpoint_stops(config: Config, whole_run: pathlib.Path) -> None:
    for meta in (whole_run / "checkpoints").glob("*/meta/metadata"):
        meta.write_text("{")
    with pytest.raises(CheckpointError, match=r"None of the checkpoints .* can be read(.|\n)*choose a new --workdir"):
        loop.train(config, whole_run)
    assert len(list((whole_run / "checkpoints").glob("[0-9]*"))) == 2  # none was moved


def test_a_schedule_from_a_file_stays_with_the_run(
    config: Config, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    table = tmp_path / "mine.csv"
    table.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    monkeypatch.chdir(tmp_path)
    config.mesh.pipe, config.pipeline.schedule = 2, "file:mine.csv"
    loop.train(config, tmp_path / "run")
    expected = Trainer(config)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["pipeline"]["schedule"] == "file:schedule.csv"

    table.unlink()
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    monkeypatch.chdir("/")
    trainer = load_trainer(moved)
    assert trainer.layout.pipeline.lowered.schedule.actions == expected.layout.pipeline.lowered.schedule.actions
    assert trainer.step == 6
    config.pipeline.schedule, config.train.num_steps = f"file:{moved}/schedule.csv", 7
    caplog.set_level("INFO", "fiddlex")
    assert loop.train(config, moved).step == 7
    assert "The config has changed since this run was last started: train.num_steps 6 → 7." in caplog.messages
    assert "The learning rate changes from" in caplog.text

    table.write_text("0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0\n")
    config.pipeline.schedule, config.train.num_steps = f"file:{table}", 8
    earlier = (moved / "schedule.csv").read_text()
    assert loop.train(config, moved).step == 8
    assert any("The schedule's table has changed" in message for message in caplog.messages)
    assert [path.read_text() for path in moved.glob("schedule-*.csv")] == [earlier]


def test_another_run_in_the_workdir_is_refused(config: Config, whole_run: pathlib.Path) -> None:
    saved = (whole_run / "config.json").read_text()
    other = copy.deepcopy(config)
    other.model.hidden_size, other.data.seed = 64, 1
    with pytest.raises(CheckpointError, match=r"model\.hidden_size is 64, was 32(.|\n)*data\.seed is 1, was 0"):
        loop.train(other, whole_run)
    assert (whole_run / "config.json").read_text() == saved


def test_a_finished_run_changes_nothing(config: Config, whole_run: pathlib.Path) -> None:
    before = records(whole_run)
    outcome = loop.train(config, whole_run)
    assert (outcome.step, outcome.record) == (6, None)
    assert records(whole_run) == before


def test_more_steps_go_on_from_the_end(
    config: Config, whole_run: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    config.train.num_steps = 8
    config.optimizer.decay_steps = 6
    caplog.set_level("INFO", "fiddlex")
    assert loop.train(config, whole_run).step == 8
    changes = "optimizer.decay_steps 0 → 6, train.num_steps 6 → 8"
    assert f"The config has changed since this run was last started: {changes}." in caplog.messages
    assert "learning rate" not in caplog.text
    caplog.clear()
    loop.train(config, whole_run)
    assert "has changed" not in caplog.text
    assert [r["step"] for r in records(whole_run)] == list(range(1, 9))


def test_workdir_that_cannot_be_written(config: Config, tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        CheckpointError, match=r"Cannot write to .*/file/workdir: .*/file is a file or a broken link .* --workdir"
    ):
        loop.train(config, tmp_path / "file" / "workdir")


@pytest.mark.parametrize("checkpoint_every", [pytest.param(1, marks=pytest.mark.long), 5])
def test_non_finite_loss_names_step_tensors_and_last_good_checkpoint(
    checkpoint_every: int, config: Config, tmp_path: pathlib.Path
) -> None:
    config.optimizer.name, config.optimizer.clip_norm = "sgd", 0.0
    config.optimizer.schedule = "constant"
    config.train.checkpoint_every = checkpoint_every
    config.train.num_steps = 10
    loop.train(config, tmp_path)  # a good start
    config.train.num_steps = 30
    diverging = copy.deepcopy(config)
    diverging.optimizer.learning_rate = 1e30
    with pytest.raises(NonFiniteError) as caught:
        loop.train(diverging, tmp_path)
    text = str(caught.value)
    assert re.search(r"Step 12 is not finite: loss", text)
    assert "Gradients that are not finite: " in text
    # With a checkpoint at every step the exploded weights of step 11 were saved; they do not count as good.
    assert Checkpoints(tmp_path).steps()[-1] == 10
    assert f"goes on from the last good checkpoint, {tmp_path}/checkpoints/10" in text
    config.train.num_steps = 12
    assert loop.train(config, tmp_path).step == 12  # as the message says


def test_weights_that_overflow_are_not_saved(config: Config, tmp_path: pathlib.Path) -> None:
    config.optimizer.name, config.optimizer.clip_norm = "sgd", 0.0
    config.optimizer.schedule, config.optimizer.learning_rate = "constant", 3e38
    config.optimizer.warmup_steps = 0
    config.train.checkpoint_every = 1
    config.optimizer.momentum = 0.99
    with pytest.raises(NonFiniteError, match=r"starts again, since there is no checkpoint"):
        loop.train(config, tmp_path)


def test_signals_are_left_alone_outside_the_main_thread(config: Config, tmp_path: pathlib.Path) -> None:
    outcomes = []
    thread = threading.Thread(target=lambda: outcomes.append(loop.train(config, tmp_path)))
    thread.start()
    thread.join()
    assert outcomes[0].step == 6


def test_bad_data_ahead_loses_no_step(config: Config, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Feed.train

    def train(self: Feed, start_step: int) -> Any:
        for step, batch in enumerate(original(self, start_step), start_step):
            if step == 3:
                raise DataError("batch 3 is bad")
            yield batch

    monkeypatch.setattr(Feed, "train", train)
    with pytest.raises(DataError, match="batch 3 is bad"):
        loop.train(config, tmp_path)
    assert [r["step"] for r in records(tmp_path)] == [1, 2, 3]
    assert Checkpoints(tmp_path).steps()[-1] == 3


def test_records_of_a_run_without_checkpoints_are_moved_aside(config: Config, tmp_path: pathlib.Path) -> None:
    config.train.checkpoint_every = 0
    config.train.num_steps = 2
    loop.train(config, tmp_path)
    before = (tmp_path / "metrics.jsonl").read_text()
    loop.train(config, tmp_path)
    (aside,) = tmp_path.glob("metrics-*.jsonl")
    assert aside.read_text() == before
    assert [r["step"] for r in records(tmp_path)] == [1, 2]


def test_an_evaluation_that_a_kill_prevented_is_made_up_for(config: Config, whole_run: pathlib.Path) -> None:
    config.train.eval_every = 4
    outcome = loop.train(config, whole_run)
    assert outcome.evaluation is not None
    assert outcome.evaluation["step"] == 6
    assert loop.train(config, whole_run).evaluation is None  # it is there now


def test_other_data_under_the_same_name_are_refused_by_a_run_and_told_of_by_an_evaluation(
    config: Config,
    whole_run: pathlib.Path,
    text_file: pathlib.Path,
    tmp_path: pathlib.Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    saved = json.loads((whole_run / "config.json").read_text())
    path = tmp_path / "text.txt"
    path.write_text(text_file.read_text().replace("argument", "parameter"))
    saved["data"]["source"] = config.data.source = f"text:{path}"  # as if the file itself had changed
    (whole_run / "config.json").write_text(json.dumps(saved))
    with pytest.raises(DataError, match=r"was trained on other data(.|\n)*choose a new --workdir"):
        loop.train(config, whole_run)
    caplog.clear()
    load_trainer(whole_run, lambda saved: override(saved, "data.eval_fraction=0.04"))
    assert not caplog.messages
    linked = tmp_path / "linked.txt"
    linked.symlink_to(path)
    load_trainer(whole_run, lambda saved: override(saved, f"data.eval_source=text:{linked}"))
    assert f"data.eval_source=text:{linked} lies in what the run trained on, text:{path}: what is scored" in caplog.text
    caplog.clear()
    load_trainer(whole_run)
    told = f"text:{path} is not what it was: what the run of {whole_run} trained on and held out has changed since."
    assert caplog.messages == [told]


def test_the_same_data_under_another_path_are_taken(
    config: Config,
    whole_run: pathlib.Path,
    text_file: pathlib.Path,
    tmp_path: pathlib.Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    moved = shutil.copy(text_file, tmp_path / "moved.txt")
    was, config.data.source = config.data.source, f"text:{moved}"
    caplog.set_level("INFO", "fiddlex")
    assert loop.train(config, whole_run).step == 6
    assert f"since this run was last started: data.source {was!r} → {config.data.source!r}." in caplog.text


def test_checksums_tell_arrays_apart_that_hold_the_same_numbers() -> None:
    def checksum(*values: float, width: int = 2) -> int:
        rows = np.zeros((4, width), np.float32)
        rows[: len(values), 0] = values
        return int(checksums({"x": jax.numpy.asarray(rows)})["x"])

    assert checksum(1.0, 2.0) == checksum(1.0, 2.0)
    assert checksum(1.0, 2.0) != checksum(2.0, 1.0)
    assert checksum(1.0, 2.0) == checksum(1.0, 2.0, width=3)  # zeros beside them are padding


def test_two_processes_in_one_workdir(config: Config, tmp_path: pathlib.Path) -> None:
    in_use = pytest.raises(ConfigError, match="Another process is training in")
    with workdirs.claimed(tmp_path, config), in_use:
        loop.train(config, tmp_path)


def test_nothing_to_evaluate_on_is_told_before_training(config: Config, tmp_path: pathlib.Path) -> None:
    config.data.eval_fraction, config.train.eval_every = 0.0, 2
    with pytest.raises(DataError, match="Nothing is held out"):
        loop.train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
