import dataclasses
import fcntl
import gzip
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import tokenizers

from fiddlex.data import JsonTokenizer
from fiddlex.data.megatron.index_file import open_indexed
from fiddlex.data.preparation import inputs, train_tokenizer
from fiddlex.data.preparation import prepare as prepare_module
from fiddlex.data.preparation.prepare import Preparation, prepare
from fiddlex.errors import ConfigError, DataError
from tests.programs import call

ROOT = pathlib.Path(__file__).parents[3]


class StoppedError(Exception):
    """Ends a preparation anywhere."""


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(inputs, "_LEAST_PIECE", 2000)


@pytest.fixture
def texts():
    words = random.Random(0)
    return ["".join(words.choices("abcde é\n", k=words.randrange(60))) for _ in range(300)]


@pytest.fixture
def lines(tmp_path, texts):
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def documents_of(prefix):
    data = open_indexed(prefix)
    return [data.tokens[first:last].tolist() for first, last in data.bounds(0, len(data.documents) - 1)]


def files_of(folder, prefix="out"):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name.startswith(prefix)}


def test_bytes(tmp_path, lines, texts):
    made = prepare(Preparation([str(lines)], tmp_path / "out"), workers=1)
    assert documents_of(tmp_path / "out") == [list(text.encode()) for text in texts if text]
    assert open_indexed(tmp_path / "out").tokens.dtype == "uint8"
    kept = [text for text in texts if text]
    sizes = sum(len(text.encode()) for text in kept)
    assert (made.counts.documents, made.counts.empty) == (len(kept), texts.count(""))
    assert made.counts.tokens == made.counts.text_bytes == sizes
    assert set(files_of(tmp_path)) == {"out.bin", "out.idx", "out-prepared.json"}


def test_separators_and_another_tokenizer(tmp_path, lines, texts):
    task = Preparation([str(lines)], tmp_path / "out", train_tokens=300, append_eod=True)
    made = prepare(task, workers=1)
    tokenizer = JsonTokenizer(tmp_path / "out-tokenizer.json")
    assert (made.vocab_size, made.tokenizer) == (300, str(tmp_path / "out-tokenizer.json"))
    expected = [[*tokenizer.encode(text).tolist(), tokenizer.separator] for text in texts if text]
    assert documents_of(tmp_path / "out") == expected
    assert open_indexed(tmp_path / "out").tokens.dtype == "uint16"
    assert tokenizer.decode(expected[0][:-1]) == next(filter(None, texts))
    again = prepare(Preparation([str(lines)], tmp_path / "named", made.tokenizer, append_eod=True), workers=1)
    assert documents_of(tmp_path / "named") == expected
    assert again.vocab_size == 300


def test_training_a_tokenizer_twice_gives_the_same_file(tmp_path, lines):
    for name in ("one", "two"):
        prepare(Preparation([str(lines)], tmp_path / name, train_tokens=400), workers=1)
    assert (tmp_path / "one-tokenizer.json").read_bytes() == (tmp_path / "two-tokenizer.json").read_bytes()


@pytest.mark.parametrize(("name", "learned"), [("a.jsonl", {"ab", "yz"}), ("a.jsonl.gz", {"ab"})])
def test_a_tokenizer_is_trained_on_so_much_text_of_each_piece(tmp_path, monkeypatch, name, learned):
    """The plain file is cut into pieces; the compressed one is a piece, and smaller than its text."""
    monkeypatch.setattr(train_tokenizer, "_MOST_BYTES", 1500)
    content = "".join(json.dumps({"text": pair * 50}) + "\n" for pair in ["ab"] * 20 + ["yz"] * 20).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    prepare(Preparation([str(tmp_path / name)], tmp_path / "out", train_tokens=300), workers=1)
    vocabulary = json.loads((tmp_path / "out-tokenizer.json").read_text())["model"]["vocab"]
    assert {"ab", "yz"} & set(vocabulary) == learned


def test_stopped_between_any_two_pieces_it_goes_on_with_the_same_bytes(tmp_path, lines, monkeypatch):
    """The process ends without any cleaning up: the parts, the record and the results are as kill -9 leaves them."""
    prepare(Preparation([str(lines)], tmp_path / "whole"), workers=1)
    expected = [path.read_bytes() for path in (tmp_path / "whole.bin", tmp_path / "whole.idx")]
    task = Preparation([str(lines)], tmp_path / "out")
    encoded = []
    original = prepare_module.encode_part

    def encode(piece, folder, number, encoding):
        if len(encoded) % 3 == 2:
            encoded.append(None)
            raise StoppedError
        encoded.append(number)
        return original(piece, folder, number, encoding)

    monkeypatch.setattr(prepare_module, "encode_part", encode)
    seen = []
    for _ in range(100):
        try:
            prepare(task, workers=1, progress=lambda done, total: seen.append((done, total)))
            break
        except StoppedError:
            assert not (tmp_path / "out.idx").exists()
    numbers = [number for number in encoded if number is not None]
    assert numbers == list(range(len(numbers)))  # no piece twice
    assert len(numbers) > 3
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (lines.stat().st_size,) * 2
    assert [path.read_bytes() for path in (tmp_path / "out.bin", tmp_path / "out.idx")] == expected


def test_its_own_files_are_no_input_and_those_of_similar_names_are(tmp_path):
    task = Preparation([str(tmp_path)], tmp_path / "out", train_tokens=300)
    own = ["out.bin", "out.idx", "out.lock", "out-prepared.json", "out-prepared.json.tmp", "out-tokenizer.json.tmp"]
    for name in (*own, "out.bin.jsonl", "out.binary.txt", "out-prepared.json.txt"):
        (tmp_path / name).write_text("text")
    found = {pathlib.Path(file).name for file, _ in task.find_files()}
    assert found == {"out.bin.jsonl", "out.binary.txt", "out-prepared.json.txt"}


@pytest.mark.parametrize("stop", ["out.bin", "out.idx", "out-prepared.json"])
def test_stopped_while_the_results_get_their_names(tmp_path, lines, monkeypatch, stop):
    prepare(Preparation([str(lines)], tmp_path / "whole"), workers=1)
    task, replace = Preparation([str(lines)], tmp_path / "out"), os.replace

    def stopping(source, target):
        if pathlib.Path(target).name == stop:
            raise StoppedError
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", stopping)
        with pytest.raises(StoppedError):
            prepare(task, workers=1)
    prepare(task, workers=1)
    for end in (".bin", ".idx"):
        assert (tmp_path / f"out{end}").read_bytes() == (tmp_path / f"whole{end}").read_bytes()
    assert not (tmp_path / "out-parts").exists()


def test_the_same_command_again_changes_nothing(tmp_path, lines):
    task = Preparation([str(lines)], tmp_path / "out")
    made = prepare(task, workers=1)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert prepare(task, workers=1) == made
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_other_options_and_other_input_replace_nothing(tmp_path, lines, monkeypatch):
    prepare(Preparation([str(lines)], tmp_path / "out"), workers=1)
    before = files_of(tmp_path)
    for changes in ({"append_eod": True}, {"json_key": "body"}, {"train_tokens": 300}):
        with pytest.raises(ConfigError, match=r"exists and was made from other input or with other options"):
            prepare(Preparation([str(lines)], tmp_path / "out", **changes), workers=1)
    lines.write_text(lines.read_text() + '{"text": "more"}\n')
    with pytest.raises(ConfigError, match="exists and was made from other input"):
        prepare(Preparation([str(lines)], tmp_path / "out"), workers=1)
    assert files_of(tmp_path) == before


def test_a_corrected_command_begins_again_where_the_first_one_completed_nothing(tmp_path, lines):
    first = Preparation([str(lines)], tmp_path / "new", json_key="body")
    with pytest.raises(DataError, match="there is no key 'body'"):
        prepare(first, workers=1)
    (tmp_path / "new-parts" / "part-000000.json").write_text("{}")  # as if a part were complete
    with pytest.raises(ConfigError, match=r"new-parts has the parts of another preparation: json_key of the input"):
        prepare(dataclasses.replace(first, json_key="text"), workers=1)
    (tmp_path / "new-parts" / "part-000000.json").unlink()
    assert prepare(dataclasses.replace(first, json_key="text"), workers=1).counts.documents > 0
    assert not (tmp_path / "new-parts").exists()


@pytest.mark.parametrize("train_tokens", [0, 300])
def test_input_that_changes_while_it_is_read_makes_nothing(tmp_path, lines, monkeypatch, train_tokens):
    task = Preparation([str(lines)], tmp_path / "new", train_tokens=train_tokens)
    real = prepare_module.encode_part

    def encode_part(*args):
        lines.write_text(lines.read_text() + '{"text": "more"}\n')
        return real(*args)

    monkeypatch.setattr(prepare_module, "encode_part", encode_part)
    with pytest.raises(DataError, match=r"has changed while it was read, and nothing was written"):
        prepare(task, workers=1)
    assert {path.name for path in tmp_path.iterdir()} == {"lines.jsonl"}
    monkeypatch.undo()
    assert prepare(task, workers=1).counts.documents > 0


def test_what_is_said_to_be_done_is_checked(tmp_path, lines):
    task = Preparation([str(lines)], tmp_path / "new", train_tokens=300)
    made = prepare(task, workers=1)
    assert prepare(task, workers=1) == made
    record = task.record.read_text()
    task.record.write_text(record.replace('"prepared": {', '"prepared": {"odd": 1,').replace('"counts"', '"count"'))
    with pytest.raises(ConfigError, match="exists and was made from other input"):
        prepare(task, workers=1)
    task.record.write_text(record)
    pathlib.Path(task.tokenizer_file).write_text("{}")
    with pytest.raises(ConfigError, match="exists and was made from other input"):
        prepare(task, workers=1)


def test_a_lock_file_that_another_process_removes_is_not_locked(tmp_path, lines, monkeypatch):
    """The other process ends after this one has opened its lock file; a third may make the file again."""
    task, flock = Preparation([str(lines)], tmp_path / "out"), fcntl.flock

    def after_the_end(descriptor, operation):
        task.lock.unlink(missing_ok=True)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", after_the_end)
    with pytest.raises(ConfigError, match="another process is making"):
        prepare(task, workers=1)
    assert not files_of(tmp_path)


def test_two_processes_make_the_same_bytes_as_one(tmp_path, lines):
    prepare(Preparation([str(lines)], tmp_path / "one"), workers=1)
    prepare(Preparation([str(lines)], tmp_path / "two"), workers=2)
    for end in (".bin", ".idx"):
        assert (tmp_path / f"one{end}").read_bytes() == (tmp_path / f"two{end}").read_bytes()


@pytest.mark.long
def test_an_error_in_one_of_two_processes(tmp_path, lines):
    lines.write_text(lines.read_text() + "oops\n")
    with pytest.raises(DataError, match=r"lines\.jsonl, line 301: 'oops' is not JSON"):
        prepare(Preparation([str(lines)], tmp_path / "out"), workers=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"train_tokens": 256},
            r"--train_tokenizer=256 must be from 257 \(256 bytes and <\|endoftext\|>\) to 1,048,576",
        ),
        ({"train_tokens": 300, "tokenizer": "a.json"}, r"--train_tokenizer=300 and --tokenizer=a\.json: leave one out"),
        ({"tokenizer": "/no/such.json"}, r"/no/such\.json does not exist"),
        ({"prefix": pathlib.Path("/tmp/a.bin")}, r"--output_prefix=/tmp/a\.bin: give it without \.bin, which is added"),
        ({"inputs": ["/no/such"]}, "--input=/no/such: there is no such file"),
    ],
)
def test_messages(tmp_path, lines, changes, message):
    with pytest.raises((ConfigError, DataError), match=message):
        prepare(Preparation(**{"inputs": [str(lines)], "prefix": tmp_path / "out"} | changes), workers=1)
    assert not (tmp_path / "out.bin").exists()


@pytest.mark.parametrize("train_tokens", [0, 300])
def test_its_own_files_are_no_input(tmp_path, lines, train_tokens):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    prepare(Preparation([str(lines)], elsewhere / "out", train_tokens=train_tokens), workers=1)
    task = Preparation([str(lines.parent)], lines.parent / "out", train_tokens=train_tokens)
    expected = files_of(elsewhere)
    shutil.rmtree(elsewhere)
    made = prepare(task, workers=1)
    assert prepare(task, workers=1) == made
    assert {name: data for name, data in files_of(lines.parent).items() if name in ("out.bin", "out.idx")} == {
        name: data for name, data in expected.items() if name in ("out.bin", "out.idx")
    }


def test_a_tokenizer_that_does_not_know_the_text_is_told(tmp_path, lines, caplog):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "[UNK]": 1}, "[UNK]"))
    tokenizer.save(str(tmp_path / "words.json"))
    made = prepare(Preparation([str(lines)], tmp_path / "out", str(tmp_path / "words.json")), workers=1)
    assert made.counts.unknown == made.counts.tokens > 0
    assert f"Of {made.counts.tokens:,} tokens 100.0% are the unknown token of --tokenizer={tmp_path}" in caplog.text


def test_a_vocabulary_without_a_separator_and_empty_input(tmp_path, lines):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "[UNK]": 1}, "[UNK]"))
    tokenizer.save(str(tmp_path / "words.json"))
    task = Preparation([str(lines)], tmp_path / "out", str(tmp_path / "words.json"), append_eod=True)
    with pytest.raises(
        ConfigError, match=r"--append_eod: .*words\.json has none of the tokens <\|endoftext\|>, <\|end_of_text"
    ):
        prepare(task, workers=1)
    lines.write_text('{"text": ""}\n')
    with pytest.raises(DataError, match=r"--input=.*lines\.jsonl has no text"):
        prepare(Preparation([str(lines)], tmp_path / "empty"), workers=1)


def test_the_binary_tells_where_the_files_are_and_what_to_set(tmp_path, lines):
    prefix = tmp_path / "out"
    flags = [f"--input={lines}", f"--output_prefix={prefix}", "--workers=1"]
    done = call("prepare_data", *flags)
    (line,) = done.stdout.splitlines()
    assert line.startswith(f"{prefix}.bin and .idx: {open_indexed(prefix).lengths.size:,} documents, ")
    assert line.endswith(
        f"Train with --config.data.source=megatron:{prefix} --config.data.tokenizer=bytes --config.model.vocab_size=256"
    )
    lines.write_text("oops\n")
    for odd in ("", f"{tmp_path}/"):
        done = call("prepare_data", f"--input={lines}", f"--output_prefix={odd}", status=2)
        assert f"--output_prefix={odd} must end in a name" in done.stderr
    done = call("prepare_data", f"--input={lines}", f"--output_prefix={tmp_path / 'bad'}", "--workers=1", status=2)
    wrong = "'oops' is not JSON (Expecting value at character 0). The text is under 'text' (--json_key)."
    assert f"lines.jsonl, line 1: {wrong}" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.long
def test_killed_by_sigkill_the_command_goes_on_with_the_same_bytes(tmp_path, texts):
    path = tmp_path / "big.jsonl"
    with path.open("w") as file:
        for _ in range(150):
            file.writelines(json.dumps({"text": text * 20}) + "\n" for text in texts)
    assert path.stat().st_size > 4 * 4 * 2**20  # several pieces
    command = [
        *(sys.executable, str(ROOT / "experiments/prepare_data.py"), f"--input={path}", "--workers=2", "--append_eod"),
    ]
    subprocess.run([*command, f"--output_prefix={tmp_path / 'whole'}"], check=True, capture_output=True)
    kills = 0
    for delay in (0.2, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 1.0, 60.0):
        process = subprocess.Popen(
            [*command, f"--output_prefix={tmp_path / 'out'}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        try:
            output, _ = process.communicate(timeout=delay)
            break
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.communicate()
            kills += 1
            time.sleep(0.2)
    assert process.returncode == 0
    assert kills >= 2
    assert f"--config.data.source=megatron:{tmp_path / 'out'}" in output.decode()
    for end in (".bin", ".idx"):
        assert (tmp_path / f"out{end}").read_bytes() == (tmp_path / f"whole{end}").read_bytes()
    assert not (tmp_path / "out-parts").exists()
