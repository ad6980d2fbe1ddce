"""Files of somebody who wants to do harm: links out of a folder, pipes, and small files that become large ones."""

import ast
import gzip
import json
import os
import pathlib
import zlib

import numpy as np
import pytest
import tokenizers
from tokenizers import models

from fiddlex.config import Config
from fiddlex.data import huggingface_datasets, token_cache
from fiddlex.data.megatron.index_file import IndexedTokens, open_indexed
from fiddlex.data.megatron.order import document_order
from fiddlex.data.preparation import inputs
from fiddlex.data.sample_log import SampleLog, read_sample_log
from fiddlex.data.tokenizers import MOST_IDS, JsonTokenizer
from fiddlex.errors import CheckpointError, ConfigError, DataError, ScheduleError
from fiddlex.files import compressed
from fiddlex.files.small_files import MOST_BYTES, json_object, read_small
from fiddlex.interop.folder import read_json
from fiddlex.interop.folder_tokenizer import copy_tokenizer
from fiddlex.interop.safetensors_files import SINGLE, TensorFolder
from fiddlex.schedules.generators import make_schedule
from fiddlex.train.run import workdir
from fiddlex.train.run.records.wandb_run import read_id
from fiddlex.train.run.transfer import original
from tests.data.megatron import plain
from tests.fuzz.text_files import word_level


def test_a_pipe_is_not_waited_for(tmp_path: pathlib.Path, limited: None) -> None:
    for name in ("config.json", SINGLE, "a.csv"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match="it is a folder, a pipe or a device"):
        read_json(tmp_path)
    with pytest.raises(CheckpointError, match="it has 0 bytes"):
        TensorFolder(tmp_path)
    with pytest.raises(ScheduleError, match="it is a folder, a pipe or a device"):
        make_schedule(f"file:{tmp_path}/a.csv")


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "config.json.tmp",
        "schedule.csv",
        "metrics.jsonl",
        "goodput.jsonl",
        "best.json",
        "faults.json",
        "wandb.json",
    ],
)
def test_a_pipe_in_a_workdir_is_not_waited_for(name: str, tmp_path: pathlib.Path, limited: None) -> None:
    os.mkfifo(tmp_path / name)
    with (
        pytest.raises(CheckpointError, match=f"{name} is a pipe or a device, and a --workdir has files and folders"),
        workdir.claimed(tmp_path, Config()),
    ):
        pass
    if name == "config.json":
        with pytest.raises(CheckpointError, match=r"config\.json cannot be read: it is a folder, a pipe or a device"):
            workdir.read_config(tmp_path)


def test_a_pipe_in_the_place_of_a_large_file_is_not_waited_for(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, limited: None
) -> None:
    """Caches are made again; a log of samples, which is all there is of what it says, is not."""
    data, file = order_file(tmp_path)
    file.unlink()
    os.mkfifo(file)
    assert document_order(data, 0, 4, seed=3).order.tolist() == ORDER
    assert "is damaged and is made again: it is a folder, a pipe or a device" in caplog.text
    tokens = tmp_path / "tokens"
    os.mkfifo(tokens)
    with pytest.raises(ValueError, match="it is a folder, a pipe or a device"):
        token_cache._opened(tokens, "digest")
    (tmp_path / "samples").mkdir()
    os.mkfifo(tmp_path / "samples" / "rank-0.jsonl")
    with pytest.raises(DataError, match=r"Cannot write .*rank-0.jsonl: it is a folder, a pipe or a device"):
        SampleLog(tmp_path, rank=0, start_step=0, rows=[0])
    with pytest.raises(DataError, match=r"rank-0.jsonl cannot be read: it is a folder, a pipe or a device"):
        read_sample_log(tmp_path, batch_size=1)


def test_a_large_file_is_refused_before_it_is_read(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "config.json"
    with file.open("wb") as opened:
        opened.truncate(2**40)  # takes no space
    with pytest.raises(ValueError, match=f"may have {MOST_BYTES:,}"):
        read_small(file)
    with pytest.raises(CheckpointError, match="it has 1,099,511,627,776 bytes"):
        read_json(tmp_path)


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 5000, "3", '{"a": 1} x', "\ud800"])
def test_what_is_no_json_object_is_one_kind_of_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"nested too deeply|digits|not a JSON object|Extra data|Expecting value"):
        json_object(text)


def test_a_workdir_has_no_file_that_leads_elsewhere(tmp_path: pathlib.Path) -> None:
    outside = tmp_path / "mine"
    outside.write_text("mine")
    (tmp_path / "disk").mkdir()
    run = tmp_path / "run"
    for name in (".lock", "config.json.tmp", "metrics.jsonl.tmp", "goodput.jsonl"):
        run.mkdir()
        (run / "checkpoints").symlink_to(tmp_path / "disk")
        (run / name).symlink_to(outside)
        with (
            pytest.raises(CheckpointError, match=f"{name} is a link to {outside}"),
            workdir.claimed(run, Config()),
        ):
            pass
        (run / name).unlink()
        with workdir.claimed(run, Config()):
            pass
        for path in run.iterdir():
            path.unlink()
        run.rmdir()
    assert outside.read_text() == "mine"


def test_files_that_are_copied_are_those_of_the_folder(tmp_path: pathlib.Path) -> None:
    """Links to other files are refused, but for those of Hugging Face's cache."""
    secret, target = tmp_path / "secret", tmp_path / "target"
    secret.write_text("{}")
    cache = tmp_path / "models--a--b"
    folder = cache / "snapshots" / "1234"
    for each in (target, folder, cache / "blobs"):
        each.mkdir(parents=True)
    (cache / "blobs" / "ab").write_text(word_level().to_str())
    (folder / "tokenizer.json").symlink_to(pathlib.Path("../../blobs/ab"))
    assert copy_tokenizer(folder, target) == target / "tokenizer.json"
    assert not (target / "tokenizer.json").is_symlink()
    (folder / "generation_config.json").symlink_to(secret)
    with pytest.raises(CheckpointError, match=f"generation_config.json is a link to {secret}"):
        copy_tokenizer(folder, target)
    assert not (target / "generation_config.json").exists()


def test_what_a_workdir_hands_on_are_the_files_that_fiddlex_knows(tmp_path: pathlib.Path) -> None:
    source, made = tmp_path / "source", tmp_path / "made"
    (source / "huggingface").mkdir(parents=True)
    made.mkdir()
    (tmp_path / "secret").write_text("{}")
    (source / "huggingface" / "config.json").write_text("{}")
    (source / "huggingface" / "other").write_text("x")
    original.inherit_original(str(source), made)
    assert [path.name for path in (made / "huggingface").iterdir()] == ["config.json"]
    (source / "huggingface" / "vocab.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=r"vocab\.txt is a link"):
        original.inherit_original(str(source), made)


@pytest.mark.parametrize("name", ["/etc/passwd", "../x.arrow", "..", "", 3, "a/b"])
def test_a_saved_dataset_names_files_of_its_folder(name: object, tmp_path: pathlib.Path) -> None:
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "a.arrow"}]}))
    huggingface_datasets._check_saved(tmp_path)
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "a.arrow"}, {"filename": name}]}))
    with pytest.raises(ValueError, match=r"state\.json names .* which is not in its folder"):
        huggingface_datasets._check_saved(tmp_path)
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": [name]}))
    with pytest.raises(ValueError, match=r"dataset_dict\.json names .* which is not in its folder"):
        huggingface_datasets._check_saved(tmp_path)


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz"])
def test_a_text_that_grows_beyond_measure_is_refused(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compressed, "MOST_TEXT", 2**16)
    text = b"a" * 2**16
    whole = text if name == "a.txt.gz" else b'{"text": "' + text[12:] + b'"}'

    def read(data: bytes) -> list[str | None]:
        (tmp_path / name).write_bytes(gzip.compress(data))
        (piece,) = inputs.cut(inputs.find_files([str(tmp_path / name)]))
        return list(inputs.read_piece(piece, "text"))

    assert len(read(whole)) == 1
    with pytest.raises(DataError, match=r"has \d+ bytes, and a text of more than 65,536 once it is"):
        read(whole + b"x")


def test_ids_decide_how_large_tables_are(tmp_path: pathlib.Path) -> None:
    words = {"a": 0, "[UNK]": MOST_IDS}
    tokenizers.Tokenizer(models.WordLevel(words, unk_token="[UNK]")).save(str(tmp_path / "t.json"))
    with pytest.raises(DataError, match="has a token with the id 16,777,216, and ids must be below 16,777,216"):
        JsonTokenizer(tmp_path / "t.json")


def test_a_number_of_layers_is_bounded_before_any_is_made() -> None:
    config = Config()
    config.model.num_layers = 2**31 - 1
    with pytest.raises(ConfigError, match=r"model\.num_layers=2147483647 must be at least 1 and at most 65536"):
        config.validate()


class _Harmful:
    """Removes a file as soon as it is unpickled."""

    def __init__(self, path: str):
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.unlink, (self._path,)


ORDER, PLACES = [3, 1, 0, 2], [0, 1, 2, 4, 7]


def order_file(folder: pathlib.Path) -> tuple[IndexedTokens, pathlib.Path]:
    data = open_indexed(plain.write(folder / "a", [[[1, 2]], [[3]], [[4, 5, 6]], [[7]]]))
    document_order(data, 0, 4, seed=3)
    (file,) = (folder / "a-cache").glob("*.npy")
    return data, file


def test_no_cached_order_is_unpickled(tmp_path: pathlib.Path) -> None:
    data, file = order_file(tmp_path)
    kept = tmp_path / "kept"
    kept.touch()
    np.save(file, np.array([_Harmful(str(kept))] * 10, object), allow_pickle=True)
    assert document_order(data, 0, 4, seed=3).order.tolist() == ORDER
    assert kept.exists()


@pytest.mark.parametrize(("place", "value"), [(0, 1), (1, -3), (4, 8), (5, -1), (8, 4)])
def test_a_cached_order_has_documents_and_tokens_that_there_are(place: int, value: int, tmp_path: pathlib.Path) -> None:
    """Also where its checksum is right: five places of tokens, four documents, the checksum."""
    data, file = order_file(tmp_path)
    numbers = np.load(file)
    numbers[place] = value
    numbers[-1] = zlib.crc32(numbers[:-1].data)
    np.save(file, numbers)
    found = document_order(data, 0, 4, seed=3)
    assert (found.order.tolist(), found.places.tolist()) == (ORDER, PLACES)


@pytest.mark.parametrize("name", ["../../x", "", "a b", 3, None, "x" * 65, "ü"])
def test_an_id_of_wandb_is_part_of_a_files_name(name: object, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "wandb.json"
    file.write_text(json.dumps({"project": "p", "id": "a1b2"}))
    assert read_id(file, project="p") == "a1b2"
    assert read_id(file, project="q") is None
    file.write_text(json.dumps({"project": "p", "id": name}))
    assert read_id(file, project="p") is None


FOLDERS = [pathlib.Path(__file__).parents[2] / name for name in ("fiddlex", "experiments")]
CODE = {
    "pickle",
    "dill",
    "cloudpickle",
    "marshal",
    "shelve",
    "joblib",
    "torch",
    "runpy",
}  # modules that run what a file says


def test_nothing_that_is_read_runs_as_code() -> None:
    """But for config files and files of functions that make schedules, which the user names and which are Python."""
    found = set()
    for path in (path for folder in FOLDERS for path in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Import(names):
                    found |= {(path.name, each.name) for each in names if each.name.partition(".")[0] in CODE}
                case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in CODE:
                    found.add((path.name, module))
                case ast.Call(func=ast.Name(id="eval" | "exec" | "compile" as name)):
                    found.add((path.name, name))
                case ast.keyword(arg="allow_pickle", value=ast.Constant(value=True)):
                    found.add((path.name, "allow_pickle"))
                case ast.Call(func=ast.Attribute(value=ast.Name(id="yaml"), attr="load" | "unsafe_load")):
                    found.add((path.name, "yaml.load"))
    assert found == {("python_files.py", "runpy")}
