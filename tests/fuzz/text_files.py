"""Readers of text files: those of a workdir, of a folder of transformers, of datasets, and of the planner."""

import dataclasses
import functools
import gzip
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.numpy
import tokenizers
from tokenizers import models, pre_tokenizers

from fiddlex.config import Config, DataConfig, ModelConfig
from fiddlex.config.user_code.registries import added
from fiddlex.data.continuations import read_continuations
from fiddlex.data.labelled_texts import read_classification, read_multiple_choice
from fiddlex.data.preparation.encoding import part_path, read_counts
from fiddlex.data.preparation.inputs import cut, find_files, read_piece
from fiddlex.data.tokenizers import JsonTokenizer
from fiddlex.hardware.topology import catalogue, load_topology
from fiddlex.interop.architectures import ARCHITECTURES
from fiddlex.interop.folder import read_settings
from fiddlex.interop.folder_tokenizer import read_tokenizer
from fiddlex.interop.safetensors_files import SINGLE
from fiddlex.planner.profile import Entry, Profile, load_profile
from fiddlex.schedules.generators import GENERATORS, make_schedule
from fiddlex.schedules.text import to_csv
from fiddlex.tools.harness_tokens import HarnessTokenizer
from fiddlex.train.inference.evaluation import merit
from fiddlex.train.run.best import read_best
from fiddlex.train.run.records.goodput import Goodput
from fiddlex.train.run.records.metrics import MetricsWriter
from fiddlex.train.run.records.wandb_run import read_id
from fiddlex.train.run.registered import find
from fiddlex.train.run.workdir import read_config
from fiddlex.train.step.stopwatch import Stopwatch
from tests.fuzz.reader import Reader
from tests.interop.folders import CONFIGS

RECORDS = [
    {"step": 1, "loss": 2.5, "tokens_per_second": 1e6},
    {"step": 2, "eval_loss": 2.25, "eval_tokens": 7},
    {"step": 2, "semantics": "2bw"},
    {"step": 3, "loss": 2.0},
]
INTERVALS = [
    {"time_s": 1.7e9, "step": 2, "seconds": {"starting": 3.0, "steps": 2.5}, "resumed_step": 0},
    {"time_s": 1.7e9 + 4, "step": 4, "seconds": {"steps": 3.5, "data_wait": 0.5}},
    {"time_s": 1.7e9 + 9, "step": 6, "seconds": {"steps": 1.0}, "resumed_step": 3, "ended": True},
]
MODEL = ModelConfig(num_layers=8, hidden_size=64, num_heads=4, seq_len=32, vocab_size=128)
PROFILE = Profile(
    machine="2 cores",
    jax_version="0.10.2",
    date="2026-11-23",
    optimizer="adamw",
    devices=(1, 2),
    sharing=(1.0, 1.5),
    tick_s=(0.0, 0.001),
    exchange_s=(0.0, 1e-9),
    update_s=1e-8,
    fixed_s=0.005,
    entries=(Entry(MODEL, 1, False, 2, "none", forward_s=0.01, backward_s=0.03, edges_s=0.004),),
)
LABELLED = DataConfig(text_fields="a,b", label_field="label", labels="no,yes")
CHOICES = DataConfig(text_fields="a", choices_fields="choices", num_choices=2, label_field="label")


def _json(*values: Any) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


def _records(data: bytes) -> list[Any]:
    """The lines that are whole JSON objects, as Python reads them."""
    found = []
    for line in data.decode("utf-8", errors="replace").split("\n"):
        try:
            found.append(json.loads(line))
        except (ValueError, RecursionError):
            continue
    return [each for each in found if isinstance(each, dict)]


def _metrics(folder: Path, data: bytes) -> None:
    """Each record that stays is one of the file's, and a run goes on behind it."""
    (folder / "metrics.jsonl").write_bytes(data)
    with MetricsWriter(folder, resumed_step=2) as writer:
        assert writer.evaluated_step <= 2
        for record in writer.evaluations:
            merit(record, "lm")
        writer.write({"step": 3, "loss": 1.0})
    *kept, last = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(last) == {"step": 3, "loss": 1.0}
    there = list(map(repr, _records(data)))
    for line in kept:
        record = json.loads(line)
        assert repr(record) in there
        assert type(record["step"]) is int
        assert record["step"] <= 2


def _goodput(folder: Path, data: bytes) -> None:
    """Whatever stays of the file, all shares are finite and add up to 1."""
    (folder / "goodput.jsonl").write_bytes(data)
    with Goodput(folder, Stopwatch(), resumed_step=1) as goodput:
        goodput.write(7)
        record = goodput.record()
    assert record is not None
    shares = [value for name, value in record.items() if name == "goodput" or name.endswith("_share")]
    assert all(0 <= share <= 1 + 1e-9 for share in shares), record
    assert math.isclose(sum(shares), 1, rel_tol=1e-6)
    assert math.isfinite(record["wall_time_s"])


def _best(folder: Path, data: bytes) -> None:
    (folder / "best" / "5").mkdir(parents=True)
    (folder / "best.json").write_bytes(data)
    record = read_best(folder, "lm")
    if record is not None:
        assert record == json.loads(data)
        assert record["step"] == 5
        merit(record, "lm")


def _config(folder: Path, data: bytes) -> None:
    (folder / "config.json").write_bytes(data)
    config = read_config(folder)
    assert Config.from_json(config.to_json()) == config or "NaN" in config.to_json()
    config.validate()


def _registered(folder: Path, data: bytes) -> None:
    """Whatever it says, nothing is registered by it."""
    config = Config()
    config.model.family = config.pipeline.schedule = "mine"
    (folder / "registered.json").write_bytes(data)
    try:
        find(config, folder)
    finally:
        assert not added()


def _wandb(folder: Path, data: bytes) -> None:
    (folder / "wandb.json").write_bytes(data)
    known = read_id(folder / "wandb.json", project="p")
    assert known is None or json.loads(data)["id"] == known
    assert known is None or known.isascii()


def _csv(folder: Path, data: bytes) -> None:
    (folder / "schedule.csv").write_bytes(data)
    schedule = make_schedule(f"file:{folder}/schedule.csv", pipe=None, chunks=None, num_microbatches=None)
    (folder / "again.csv").write_text(to_csv(schedule))
    again = make_schedule(f"file:{folder}/again.csv", pipe=None, chunks=None, num_microbatches=None)
    assert again.actions == schedule.actions
    assert len(schedule.numbered) <= len(data) // 3


def _csvs() -> list[bytes]:
    chunked = GENERATORS["interleaved_1f1b"](pipe=2, chunks=2, num_microbatches=2)
    made = [GENERATORS[name](pipe=2, num_microbatches=3) for name in ("1f1b", "zb_h1")]
    torch = (Path(__file__).parents[1] / "schedules" / "overlapped.csv").read_bytes()
    return [torch, *(to_csv(schedule).encode() for schedule in (chunked, *made))]


def _profile(folder: Path, data: bytes) -> None:
    (folder / "p.json").write_bytes(data)
    profile = load_profile(folder / "p.json")
    assert all(map(math.isfinite, (*profile.sharing, *profile.tick_s, profile.update_s, profile.fixed_s)))
    assert all(math.isfinite(each.forward_s) and each.forward_s > 0 for each in profile.entries)


def _topology(folder: Path, data: bytes) -> None:
    (folder / "t.toml").write_bytes(data)
    topology = load_topology(str(folder / "t.toml"))
    assert all(math.isfinite(link.bandwidth) and link.bandwidth > 0 for link in topology.links)


def _topologies() -> list[bytes]:
    folder = Path(__file__).parents[2] / "fiddlex" / "hardware" / "topologies"
    return [(folder / f"{name}.toml").read_bytes() for name in catalogue()[:3]]


def _hf_config(folder: Path, data: bytes) -> None:
    (folder / "config.json").write_bytes(data)
    safetensors.numpy.save_file({}, folder / SINGLE)
    settings = read_settings(folder)
    settings["model"].validate()


def word_level() -> tokenizers.Tokenizer:
    """A tokenizer of seven words."""
    words = {"[UNK]": 0, "a": 1, "b": 2, "[PAD]": 3, "[CLS]": 4, "[SEP]": 5, "[MASK]": 6}
    made = tokenizers.Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made


def _byte_pairs() -> tokenizers.Tokenizer:
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = tokenizers.Tokenizer(models.BPE(letters | {"ab": 256, "<|endoftext|>": 257}, [("a", "b")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens(["<|endoftext|>"])
    return made


def _tokenizer_files() -> list[bytes]:
    return [made.to_str().encode() for made in (word_level(), _byte_pairs())]


def _tokenizer(folder: Path, data: bytes) -> None:
    (folder / "tokenizer.json").write_bytes(data)
    tokenizer = JsonTokenizer(folder / "tokenizer.json")
    ids = tokenizer.encode("a b ab")
    assert ((ids >= 0) & (ids < tokenizer.vocab_size)).all()
    assert len(tokenizer.vocabulary.ends) == tokenizer.vocab_size
    read_tokenizer(folder)


def _tokenizer_config(folder: Path, data: bytes) -> None:
    (folder / "tokenizer_config.json").write_bytes(data)
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
    made = read_tokenizer(folder)
    assert made is not None
    made.save(str(folder / "tokenizer.json"))
    HarnessTokenizer(JsonTokenizer(folder / "tokenizer.json"), str(folder / "tokenizer.json")).encode("a")


def _table(kind: str, read: Callable[[str], Any], folder: Path, data: bytes) -> None:
    (folder / "rows").write_bytes(data)
    table = read(f"{kind}:{folder}/rows")
    assert 0 < len(table) <= data.count(b"\n") + 1
    for row in table.rows:
        str(dataclasses.asdict(row)).encode("utf-8")


def _labelled(source: str) -> Any:
    return read_classification(source, LABELLED)


def _choices(source: str) -> Any:
    return read_multiple_choice(source, CHOICES)


def _continuations(source: str) -> Any:
    return read_continuations(source, skip_bad_lines=False)


def _inputs(name: str, folder: Path, data: bytes) -> None:
    """The texts of a file that `prepare_data` reads."""
    (folder / name).write_bytes(data)
    for piece in cut(find_files([str(folder / name)])):
        for text in read_piece(piece, "text"):
            assert text is not None
            text.encode("utf-8")


def _counts(folder: Path, data: bytes) -> None:
    part_path(folder, 0).with_name("part-000000.json").write_bytes(data)
    counts = read_counts(folder, 0)
    assert counts is not None
    assert min(dataclasses.astuple(counts)) >= 0


ENTRY = {"name": "mine", "module": "no.such", "config": "/no.py", "files": ["/no.py"], "digest": "0" * 64}
RECORD = {"model.family": ENTRY | {"name": "other"}, "pipeline.schedule": ENTRY | {"module": ""}}
TEXTS = _json({"text": "one\ntwo"}, {"text": "caf\u00e9 \ud83d\ude00", "n": 1})
READERS = (
    Reader("metrics", lambda: [_json(*RECORDS)], _metrics, is_json=True, may_be_cut=True),
    Reader("goodput", lambda: [_json(*INTERVALS)], _goodput, is_json=True, may_be_cut=True),
    Reader("best", lambda: [_json({"step": 5, "eval_loss": 2.5})], _best, is_json=True, may_be_cut=True),
    Reader("workdir_config", lambda: [Config().to_json().encode()], _config, is_json=True),
    Reader("registered", lambda: [_json(RECORD)], _registered, is_json=True, may_be_cut=True),
    Reader("wandb", lambda: [_json({"project": "p", "id": "a1b2c3d4"})], _wandb, is_json=True, may_be_cut=True),
    Reader("schedule_csv", _csvs, _csv, may_be_cut=True),
    Reader("profile", lambda: [_json(dataclasses.asdict(PROFILE))], _profile, is_json=True),
    Reader("topology", _topologies, _topology, may_be_cut=True),
    Reader("hf_config", lambda: [_json(_described(name)) for name in CONFIGS], _hf_config, is_json=True),
    Reader("tokenizer", _tokenizer_files, _tokenizer, is_json=True),
    Reader(
        "tokenizer_config",
        lambda: [_json({"do_lower_case": True, "bos_token": {"content": "[CLS]"}, "eos_token": "[SEP]"})],
        _tokenizer_config,
        is_json=True,
    ),
    Reader(
        "tsv",
        lambda: [b"a\tb\tlabel\nx\ty\tyes\nz\tw\tno\n"],
        functools.partial(_table, "tsv", _labelled),
        may_be_cut=True,
    ),
    Reader(
        "jsonl",
        lambda: [_json({"a": "x", "b": "y", "label": "yes"}, {"a": "z", "b": "w", "label": "no"})],
        functools.partial(_table, "jsonl", _labelled),
        is_json=True,
        may_be_cut=True,
    ),
    Reader(
        "choices",
        lambda: [_json({"a": "x", "choices": ["y", "z"], "label": 1}, {"a": "x", "choices": ["y", "z"], "label": "A"})],
        functools.partial(_table, "jsonl", _choices),
        is_json=True,
        may_be_cut=True,
    ),
    Reader(
        "continuations",
        lambda: [_json({"context": "a", "choices": [" b", " c"], "label": 0}), _json({"text": "a b"})],
        functools.partial(_table, "jsonl", _continuations),
        is_json=True,
        may_be_cut=True,
    ),
    Reader("input_jsonl", lambda: [TEXTS], functools.partial(_inputs, "a.jsonl"), is_json=True, may_be_cut=True),
    Reader("input_gz", lambda: [gzip.compress(TEXTS, mtime=0)], functools.partial(_inputs, "a.jsonl.gz")),
    Reader("input_text_gz", lambda: [gzip.compress(TEXTS, mtime=0)], functools.partial(_inputs, "a.txt.gz")),
    Reader("part_counts", lambda: [_json({"documents": 2, "tokens": 9, "text_bytes": 9})], _counts, is_json=True),
)


def _described(name: str) -> dict[str, Any]:
    return {"architectures": [name], "model_type": ARCHITECTURES[name].model_type} | CONFIGS[name]
