"""What is written for people and TensorBoard, and what happens when it cannot be."""

import contextlib
import logging
import pathlib
import resource
import struct
from collections.abc import Iterator

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import masked_crc32c

from fiddlex.errors import CheckpointError
from fiddlex.train.run.records import metrics
from fiddlex.train.run.records.metrics import MetricsWriter
from fiddlex.train.run.records.tensorboard import EventFile


def events(workdir: pathlib.Path) -> list[Event]:
    """The events of the one event file, read as TensorFlow's TFRecord format has it."""
    (path,) = (workdir / "tensorboard").glob("events.out.tfevents.*")
    data, found = path.read_bytes(), []
    while data:
        length, length_crc = struct.unpack("<QI", data[:12])
        body, (body_crc,) = data[12 : 12 + length], struct.unpack("<I", data[12 + length : 16 + length])
        assert (length_crc, body_crc) == (masked_crc32c(data[:8]), masked_crc32c(body))
        found.append(Event.FromString(body))
        data = data[16 + length :]
    return found


def test_tensorboard_has_the_records_under_their_names(tmp_path: pathlib.Path) -> None:
    with MetricsWriter(tmp_path, resumed_step=3) as writer:
        writer.write({"step": 4, "loss": 2.5, "tokens_per_second": 1e6})
        writer.write({"step": 4, "eval_loss": 2.25, "eval_tokens": 7})
    version, start, *written = events(tmp_path)
    assert version.file_version == "brain.Event:2"
    assert (start.session_log.status, start.step) == (SessionLog.START, 4)  # hides what a lost step 4 has left
    assert [(event.step, {value.tag: value.simple_value for value in event.summary.value}) for event in written] == [
        (4, {"loss": 2.5, "tokens_per_second": 1e6}),
        (4, {"eval_loss": 2.25, "eval_tokens": 7}),
    ]


def test_tensorboard_has_each_record_of_a_process_that_is_killed(tmp_path: pathlib.Path) -> None:
    with MetricsWriter(tmp_path, resumed_step=0) as writer:
        for step in (1, 2):
            writer.write({"step": step, "loss": 2.5})
            assert [event.step for event in events(tmp_path)[2:]] == list(range(1, step + 1))


def test_a_run_without_records_leaves_no_event_file(tmp_path: pathlib.Path) -> None:
    with MetricsWriter(tmp_path, resumed_step=3):
        pass
    assert not any((tmp_path / "tensorboard").iterdir())


def test_records_of_steps_that_are_trained_again_are_dropped(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("fiddlex"), "propagate", True)
    lines = ['{"step": 1, "loss": 2.0}', '{"step": 2, "loss": 1.0}', '{"step": 2, "eval_loss": 3.0}']
    lost = ['{"step": 3, "loss": 0.5}', '{"step": 3, "eval_loss": 2.5}', '{"step": 4, "lo']
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join([*lines, *lost]))
    with MetricsWriter(tmp_path, resumed_step=2) as writer:
        assert writer.evaluated_step == 2
        writer.write({"step": 3, "loss": 0.25})
    assert caplog.messages == [f"{path}: left out 1 line that is no record."]
    assert path.read_text().splitlines() == [*lines, '{"step": 3, "loss": 0.25}']


@contextlib.contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Writing more than that to a file fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("name", ["metrics.jsonl", "tensorboard"])
def test_full_disk_ends_the_run_with_a_message(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "metrics.jsonl":  # an event is longer than its line of JSON
        monkeypatch.setattr(EventFile, "write", lambda *args, **options: None)
    message = rf"Cannot write to {tmp_path}/{name}: File too large\. Make room .* choose another --workdir"
    with largest_file(4096), pytest.raises(CheckpointError, match=message):
        write_losses(tmp_path, num_steps=1000)


def test_what_cannot_be_written_in_the_last_step_is_told(tmp_path: pathlib.Path) -> None:
    message = f"Cannot write to {tmp_path}/tensorboard: File too large"
    with largest_file(64), pytest.raises(CheckpointError, match=message):
        write_losses(tmp_path, num_steps=1)


def write_losses(workdir: pathlib.Path, *, num_steps: int) -> None:
    with MetricsWriter(workdir, resumed_step=0) as writer:
        for step in range(1, num_steps + 1):
            writer.write({"step": step, "loss": 1.0})


def test_an_evaluation_in_words() -> None:
    pairs = {"eval_loss": 3.5, "eval_masked_loss": 3.0, "eval_pair_loss": 0.5, "eval_masked_accuracy": 0.25}
    assert metrics.describe(pairs) == "held-out loss 3.5000 (masked 3.0000, pair 0.5000), masked accuracy 25.0%"
    masked = {"eval_loss": 3.0, "eval_masked_accuracy": 0.5, "eval_masked_majority": 0.28}
    assert metrics.describe(masked) == (
        "held-out loss 3.0000, masked accuracy 50.0% (always the most common token: 28.0%)"
    )
    task = {"eval_loss": 1.0, "eval_accuracy": 0.5, "eval_accuracy_low": 0.4, "eval_accuracy_high": 0.6}
    assert metrics.describe(task) == "held-out loss 1.0000, accuracy 50.0% (95% interval 40.0% to 60.0%)"


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 1.0, "loss": 2.0}',
        '{"step": true, "loss": 2.0}',
        '{"step": NaN, "loss": 2.0}',
        '{"step": -1, "loss": 2.0}',
        '{"step": 2, "eval_loss": "2.0"}',
        '{"step": 2, "eval_loss": null}',
        '{"step": 1, "loss": ' + "9" * 5000 + "}",
        '{"step": 1, "loss": ' + "[" * 100_000,
        '["step", 1]',
        "x" * 3 * 2**20,
    ],
    ids=lambda line: line[:32],
)
def test_a_line_that_no_run_writes_is_left_out(line: str, tmp_path: pathlib.Path) -> None:
    whole = ['{"step": 1, "loss": 2.0}', '{"step": 2, "eval_loss": 3.0}']
    path = tmp_path / "metrics.jsonl"
    path.write_text(f"{whole[0]}\n{line}\n{whole[1]}")  # a last line without its end is whole too
    with MetricsWriter(tmp_path, resumed_step=2) as writer:
        assert writer.evaluations == [{"step": 2, "eval_loss": 3.0}]
        writer.write({"step": 3, "loss": 0.25})
    assert path.read_text().splitlines() == [*whole, '{"step": 3, "loss": 0.25}']
