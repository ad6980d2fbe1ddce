"""Runs, evaluations and measurements where memory is scarce, too little, or full."""

import logging
import types

import jax
import pytest

from fiddlex.cluster import processes
from fiddlex.cluster.free_memory import Limit
from fiddlex.cluster.mesh import make_mesh
from fiddlex.config.files import load_config
from fiddlex.errors import ConfigError
from fiddlex.planner.enough_memory import Use, process_needs
from fiddlex.terminal.memory_advice import is_lack_of_memory
from fiddlex.train.loop import train
from fiddlex.train.run.faults import require_memory as module
from fiddlex.train.run.faults.require_memory import require_memory
from fiddlex.train.timing import TimedCase, time_steps
from fiddlex.train.trainer import Trainer, load_trainer
from tests.small_run import config_of, small, steps

GIB = 2**30
FULL = "RESOURCE_EXHAUSTED: Out of memory allocating 1 byte."


@pytest.fixture
def has(monkeypatch):
    """Makes the machine have only so many bytes that are free."""

    def set_free(free: float) -> None:
        monkeypatch.setattr(module, "limits", lambda: [Limit("on the machine", int(free), 0)])

    return set_free


def need(config, use=Use.TRAINING):
    return sum(process_needs(config, use, num_processes=1).values())


def test_a_run_without_memory_is_refused_and_leaves_nothing(has, text_file, tmp_path):
    config = config_of(small(text_file, train_num_steps=2))
    has(need(config) / 2)
    with pytest.raises(ConfigError, match=r"Training is predicted to need .* --force goes on all the same\."):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_with_scarce_memory_warns_and_a_forced_one_too(has, text_file, tmp_path, caplog):
    config = config_of(small(text_file, train_num_steps=2, train_checkpoint_every=1))
    has(need(config) * 1.01)
    assert train(config, tmp_path).step == 2
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "It goes on, and may end for lack of memory." in warning.message
    caplog.clear()

    more = config_of(small(text_file, train_num_steps=3, train_checkpoint_every=1))
    has(need(more) / 2)
    with pytest.raises(ConfigError, match="is predicted to need"):  # a resumed run is asked too
        train(more, tmp_path)
    assert train(more, tmp_path, force=True).step == 3
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "--force was given: it goes on." in warning.message

    has(need(more, Use.SCORING) / 2)
    with pytest.raises(ConfigError, match="Evaluating is predicted to need"):
        load_trainer(tmp_path)
    assert load_trainer(tmp_path, force=True).step == 3
    with pytest.raises(ConfigError, match="Measuring the step is predicted to need"):
        time_steps([TimedCase(more)], limit_s=0)
    with pytest.raises(ConfigError, match="Evaluating is predicted to need"):
        time_steps([TimedCase(more, forward_only=True)], limit_s=0)


def test_the_first_command_of_the_readme_is_silent_on_a_small_machine(has, caplog):
    config = load_config("gpt_tiny").validate()
    has(GIB / 2)
    require_memory(config, make_mesh(config.mesh), Use.TRAINING, force=False)
    assert not caplog.records


def test_where_nothing_is_known_nothing_is_said(monkeypatch, text_file, caplog):
    monkeypatch.setattr(module, "limits", list)
    trainer = Trainer(config_of(small(text_file)))
    require_memory(trainer.config, trainer.mesh, Use.TRAINING, force=False)
    assert not caplog.records


def test_processes_of_a_machine_share_its_memory_but_not_their_own_groups(monkeypatch, text_file):
    config = config_of(small(text_file, mesh_data=4))
    mesh = Trainer(config).mesh
    alone = sum(process_needs(config, Use.TRAINING, num_processes=4).values())
    monkeypatch.setattr(processes, "num_processes", lambda: 4)

    def ask(machine: float, group: float) -> None:
        told = [
            [[f"{place} machine", "on the machine", machine, 0], [f"{place} {rank}", f"in group {rank}", group, 0]]
            for rank, place in enumerate(["here", "here", "here", "there"])
        ]
        monkeypatch.setattr(processes, "gather", lambda name, value: told)
        require_memory(config, mesh, Use.TRAINING, force=False)

    ask(machine=4 * alone, group=1.3 * alone)
    with pytest.raises(ConfigError, match=r"all fake devices of 3 processes together, and .* free on the machine\."):
        ask(machine=2 * alone, group=1.3 * alone)
    with pytest.raises(ConfigError, match=r"all fake devices together, and .* GiB is free in group 0\."):
        ask(machine=4 * alone, group=0.5 * alone)


@pytest.mark.parametrize(
    ("stats", "refused"),
    [
        ({"bytes_limit": GIB, "bytes_in_use": 0}, False),
        ({"bytes_limit": GIB, "bytes_in_use": GIB}, True),
        ({"bytes_limit": 1000}, True),
        ({"bytes_in_use": 5}, False),
        (None, False),
    ],
)
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_a_device_is_asked_for_its_own_memory(stats, refused, platform, text_file, caplog):
    rich = types.SimpleNamespace(memory_stats=lambda: {"bytes_limit": 2 * GIB})
    poor = types.SimpleNamespace(memory_stats=lambda: stats)
    for device in (rich, poor):
        device.platform, device.device_kind = platform, f"{platform} of a kind"
    mesh = types.SimpleNamespace(devices=types.SimpleNamespace(flat=[rich, poor]), local_devices=[rich, poor])
    config = config_of(small(text_file))
    if refused:
        with pytest.raises(ConfigError, match=rf"on each device, and 0\.00 GiB is free on a {platform} of a kind\."):
            require_memory(config, mesh, Use.TRAINING, force=False)
    else:
        require_memory(config, mesh, Use.TRAINING, force=False)
    assert not caplog.records


@pytest.mark.parametrize(
    ("where", "saved"), [("evaluate", 2), pytest.param("dispatch", 2, marks=pytest.mark.long), ("record", 1)]
)
def test_a_run_that_runs_out_of_memory_saves_what_is_there_and_tells(where, saved, text_file, tmp_path, monkeypatch):
    """The weights before the failure are there, unless the failure is one of a step that has taken them over."""
    config = config_of(small(text_file, train_num_steps=4, train_checkpoint_every=0, train_eval_every=2))
    real = getattr(Trainer, where)

    def fails(trainer: Trainer, *arguments: object, **options: object) -> object:
        if trainer.step >= 2:
            raise jax.errors.JaxRuntimeError(FULL)
        return real(trainer, *arguments, **options)

    monkeypatch.setattr(Trainer, where, fails)
    with pytest.raises(jax.errors.JaxRuntimeError, match=FULL) as raised:
        train(config, tmp_path)
    assert is_lack_of_memory(raised.value)
    told, goes_on = raised.value.__notes__
    assert told.startswith("Predicted for all fake devices of a process: 0.09 GiB (program 0.093")
    if saved == 2:
        assert goes_on == "The same command, also with such a change, goes on from the checkpoint of step 2."
    else:
        assert goes_on == "There is no checkpoint yet."
    monkeypatch.undo()
    assert train(config, tmp_path).step == 4
    assert steps(tmp_path)[-1] == 4
