"""Weights & Biases: a stand-in for the package that remembers what it is told, and the package itself offline."""

import contextlib
import glob
import json
import logging
import os
import pathlib
import signal
import struct
import sys
import types

import pytest

from fiddlex.config import Config
from fiddlex.config.overrides import replaced
from fiddlex.errors import ConfigError
from fiddlex.train.run.records.metrics import MetricsWriter
from fiddlex.train.run.records.wandb_run import WandbRun

CONFIG = replaced(Config(), {"train.wandb_project": "mine"})


class Service:
    """A stand-in for the package wandb.

    Attributes:
      started: the arguments of each `init`.
      rows: what each run was given, in order.
      ended: the exit codes.
      failing: the names of the functions that fail.
      summary: the last value of each number that was received.
      received: whether what is written is received.
    """

    Settings = types.SimpleNamespace

    def __init__(self) -> None:
        self.started: list[dict] = []
        self.rows: list[dict] = []
        self.ended: list[int] = []
        self.failing: set[str] = set()
        self.summary: dict = {}
        self.received = True

    def init(self, **arguments):
        self.started.append(arguments)
        self._fail("offline" if arguments["mode"] == "offline" else "init")
        return self

    offline, url = False, "https://wandb.example/mine"

    def define_metric(self, name, *, step_metric):
        assert (name, step_metric) == ("*", "step")

    def log(self, row):
        self._fail("log")
        self.rows.append(row)
        if self.received:
            self.summary.update(row)

    def finish(self, *, exit_code):
        self._fail("finish")
        self.ended.append(exit_code)

    def teardown(self):
        pass

    def _fail(self, name: str) -> None:
        if name in self.failing:
            raise ConnectionError(f"no network for {name}\nand more about it")


@pytest.fixture
def service(monkeypatch):
    service = Service()
    monkeypatch.setitem(sys.modules, "wandb", service)
    monkeypatch.setattr(logging.getLogger("fiddlex"), "propagate", True)
    return service


def write(workdir: pathlib.Path, records: list[dict], *, resumed_step: int = 0, config: Config = CONFIG) -> None:
    run = WandbRun(workdir, config, resumed_step=resumed_step)
    with MetricsWriter(workdir, resumed_step=resumed_step, wandb_run=run) as writer:
        for record in records:
            writer.write(record)


def losses(*steps: int) -> list[dict]:
    return [{"step": step, "loss": 1 / step} for step in steps]


def test_the_numbers_and_the_config_are_written(tmp_path, service):
    write(tmp_path, [*losses(1, 2), {"step": 2, "eval_loss": 0.75, "note": "text"}])
    assert service.rows == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}, {"step": 2, "eval_loss": 0.75}]
    (started,) = service.started
    assert started["config"]["train"]["wandb_project"] == started["project"] == "mine"
    assert (started["resume"], started["dir"], started["mode"]) == ("allow", str(tmp_path), None)
    assert service.ended == [0]


def test_a_resumed_run_goes_on_without_writing_a_step_twice(tmp_path, service):
    evaluation = {"step": 3, "eval_loss": 0.75}
    write(tmp_path, losses(1, 2, 3, 4))  # killed before its evaluation of step 3 was written, and checkpointed at 2
    write(tmp_path, [*losses(3), evaluation, *losses(4, 5)], resumed_step=2)
    assert [started["id"] for started in service.started] == [service.started[0]["id"]] * 2
    assert service.rows == [*losses(1, 2, 3, 4), evaluation, *losses(5)]


def test_a_resumed_run_writes_what_was_not_received_before_it_was_killed(tmp_path, service):
    write(tmp_path, losses(1, 2, 3))
    service.received = False
    write(tmp_path, losses(4, 5), resumed_step=3)
    service.rows.clear()
    write(tmp_path, losses(3, 4, 5, 6), resumed_step=2)
    assert service.rows == losses(4, 5, 6)


def test_offline_nothing_that_was_written_is_written_again(tmp_path, service):
    service.offline = True
    service.received = False
    write(tmp_path, losses(1, 2, 3))
    write(tmp_path, losses(2, 3, 4), resumed_step=1)
    assert service.rows == losses(1, 2, 3, 4)


def test_a_run_from_the_start_or_in_another_project_is_a_run_of_its_own(tmp_path, service):
    write(tmp_path, losses(1, 2))
    write(tmp_path, losses(1, 2))
    write(tmp_path, losses(2, 3), resumed_step=1, config=replaced(CONFIG, {"train.wandb_project": "other"}))
    assert len({started["id"] for started in service.started}) == 3
    assert service.rows == losses(1, 2, 1, 2, 2, 3)


@pytest.mark.parametrize("text", ["", "[]", '{"project": "mine"}', '{"project": "mine", "id": 3}', "\0"])
def test_a_damaged_note_of_the_id_starts_another_run(text, tmp_path, service):
    (tmp_path / "wandb.json").write_text(text)
    write(tmp_path, losses(2), resumed_step=1)
    assert isinstance(service.started[0]["id"], str)
    assert service.rows == losses(2)


@pytest.mark.parametrize(
    ("failing", "rows", "message"),
    [
        ({"init"}, losses(1, 2), "cannot be started at Weights & Biases (no network for init). Its numbers are kept"),
        ({"init", "offline"}, [], "Nothing is written for Weights & Biases: no network for offline."),
        ({"log"}, [], "Cannot write to the run at Weights & Biases: no network for log. Training goes on without it."),
        ({"finish"}, losses(1, 2), "Cannot finish the run at Weights & Biases: no network for finish."),
    ],
)
def test_no_failure_stops_the_run(failing, rows, message, tmp_path, service, caplog):
    service.failing = failing
    write(tmp_path, losses(1, 2))
    assert service.rows == rows
    assert sum(message in text for text in caplog.messages) == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_run_that_fails_is_told_so(tmp_path, service):
    run = WandbRun(tmp_path, CONFIG, resumed_step=0)
    with pytest.raises(ZeroDivisionError), MetricsWriter(tmp_path, resumed_step=0, wandb_run=run):
        raise ZeroDivisionError
    assert service.ended == [1]


def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"train.wandb_project='mine' needs the package wandb.*fiddlex\[wandb\]"):
        WandbRun(tmp_path, CONFIG, resumed_step=0)
    assert not list(tmp_path.iterdir())


def rows_on_disk(workdir: pathlib.Path) -> list[dict]:
    """The rows in wandb's files of offline runs, the earliest run first: LevelDB's log format after seven bytes."""
    pb = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    rows = []
    for path in sorted(workdir.glob("wandb/offline-run-*/*.wandb")):
        data, place, record = path.read_bytes(), 7, b""
        while len(data) - place >= 7:
            left = 32768 - place % 32768
            if left < 7:
                place += left
                continue
            _, length, kind = struct.unpack_from("<IHB", data, place)
            record += data[place + 7 : place + 7 + length]
            place += 7 + length
            if kind in (1, 4):  # the whole record, or its last part
                found = pb.Record.FromString(record)
                if found.WhichOneof("record_type") == "history":
                    items = {item.key or item.nested_key[0]: item.value_json for item in found.history.item}
                    rows.append({name: json.loads(x) for name, x in items.items() if not name.startswith("_")})
                record = b""
    return rows


@pytest.mark.long
def test_the_package_itself_offline(tmp_path, monkeypatch, caplog):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    write(tmp_path, losses(1, 2, 3))
    write(tmp_path, losses(3, 4), resumed_step=2)
    wandb.teardown()  # waits for its service, which writes the files
    assert rows_on_disk(tmp_path) == losses(1, 2, 3, 4)
    assert len({path.name.rpartition("-")[2] for path in tmp_path.glob("wandb/offline-run-*")}) == 1


@pytest.mark.long
def test_the_package_itself_without_a_network(tmp_path, monkeypatch, caplog):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setattr(logging.getLogger("fiddlex"), "propagate", True)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("fiddlex.train.run.records.wandb_run._INIT_TIMEOUT_S", 3.0)
    write(tmp_path, losses(1, 2))
    wandb.teardown()  # waits for its service, which writes the files
    assert rows_on_disk(tmp_path) == losses(1, 2)
    assert sum("cannot be started at Weights & Biases" in text for text in caplog.messages) == 1


@pytest.mark.long
def test_the_package_itself_when_its_service_dies(tmp_path, monkeypatch, caplog):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setattr(logging.getLogger("fiddlex"), "propagate", True)
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = WandbRun(tmp_path, CONFIG, resumed_step=0)
    with MetricsWriter(tmp_path, resumed_step=0, wandb_run=run) as writer:
        for step in range(1, 101):
            writer.write({"step": step, "loss": 1.0})
            if step == 10:
                for path in glob.glob("/proc/[0-9]*/stat"):
                    pid, name, _, parent = pathlib.Path(path).read_text().split()[:4]
                    if int(parent) == os.getpid() and "wandb" in name:
                        os.kill(int(pid), signal.SIGKILL)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 100
    assert sum("Training goes on without it" in text for text in caplog.messages) == 1
    with contextlib.suppress(ConnectionError):
        wandb.teardown()  # starts another service for the tests that follow
