"""The study of predicted memory: what it found still holds, and so it does of steps compiled here."""

import pathlib

import pytest

from experiments.memory_cases import CASES, Case
from experiments.memory_model import compiled_bytes, make_config, predicted_bytes, read, table
from fiddlex.config import Config
from fiddlex.errors import DeviceError

TOLERANCE = 0.1
STUDY = pathlib.Path(__file__).parents[1] / "docs/studies/memory.jsonl"
MISSES = {"BERT base, MNLI", "small, sequences of 8,192, full"}  # docs/memory.md tells why

ON_TPUS = {  # of a GPT of hidden size 512 on 2 × 2 devices
    "1f1b": {},
    "2bw that recomputes": {"pipeline.semantics": "2bw", "pipeline.recompute": "full", "data.global_batch_size": 32},
    "2bw": {"pipeline.semantics": "2bw", "data.global_batch_size": 32},
    "bert": {"model.family": "bert", "model.dropout": 0.1, "model.post_norm": True, "pipeline.recompute": "selective"},
}


@pytest.mark.parametrize("case", ON_TPUS)
def test_prediction_is_near_what_xla_assigns_on_tpus(case: str) -> None:
    pytest.importorskip("libtpu", reason="compiling for TPUs takes libtpu, of the extra `aot`")
    config = Config()
    config.model.num_layers, config.model.hidden_size, config.model.num_heads = 8, 512, 8
    config.model.seq_len, config.model.vocab_size, config.model.dtype = 1024, 16384, "bfloat16"
    config.mesh.data, config.mesh.pipe = 2, 2
    config.pipeline.num_microbatches, config.data.global_batch_size = 4, 64
    config = changed(config, ON_TPUS[case]).validate()
    assert predicted_bytes(config) == pytest.approx(compiled_bytes(config, "tpu:v5e:2x2"), rel=TOLERANCE)


@pytest.mark.parametrize("case", [case for case in CASES if case not in MISSES])
def test_prediction_is_near_what_the_study_found(case: str) -> None:
    config = make_config(CASES[case])
    assert predicted_bytes(config) == pytest.approx(read(STUDY)[case]["compiled_bytes"], rel=TOLERANCE)


def test_the_table_of_the_docs_is_of_the_results() -> None:
    assert table(read(STUDY)) in (STUDY.parents[1] / "memory.md").read_text(encoding="utf-8")


def test_results_of_cases_that_have_changed_are_not_used(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(read(STUDY)) == list(CASES)
    name, case = next(iter(CASES.items()))
    monkeypatch.setitem(CASES, name, Case(case.config, case.topology, f"{case.changes} train.seed=1"))
    assert name not in read(STUDY)
    assert read(tmp_path / "none.jsonl") == {}


def test_what_does_not_compile_is_told() -> None:
    pytest.importorskip("libtpu", reason="compiling for TPUs takes libtpu, of the extra `aot`")
    config = Config()
    config.mesh.data = 2
    with pytest.raises(DeviceError, match="tpu:v5e:2x2: mesh data=2 × pipe=1 × tensor=1 needs 2 devices"):
        compiled_bytes(config.validate(), "tpu:v5e:2x2")


def changed(config: Config, changes: dict[str, object]) -> Config:
    for path, value in changes.items():
        section, field = path.split(".")
        setattr(getattr(config, section), field, value)
    return config
