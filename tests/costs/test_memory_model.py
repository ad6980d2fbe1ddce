"""The study of predicted memory: what it found still holds, and so it does of steps compiled here."""

import pathlib

import pytest

from experiments.memory_cases import CASES, CASES_ON, LONG, MemoryCase
from experiments.memory_model import compiled_bytes, make_config, predicted_bytes, predicted_host_bytes, read, table
from fiddlex.config import Config
from fiddlex.config.overrides import replaced
from fiddlex.errors import DeviceError
from tests.compiling import needs_cuda_plugin

TOLERANCE = 0.1
HOST_TOLERANCE = 0.02
# GPT-2 XL has 25 heads of 64 elements, which XLA pads to 32 of 128 in some of these arrays of the host.
HOST_MISSES = {("tpu", "xl, 2BW, offload"), ("tpu", "xl, 8 replicas, 12 chunks, weights on hosts")}
STUDIES = pathlib.Path(__file__).parents[2] / "docs/studies"
STUDY = {"tpu": STUDIES / "memory.jsonl", "gpu": STUDIES / "memory_gpu.jsonl"}
MISSES = {  # docs/memory.md tells why
    ("tpu", "BERT base, MNLI"),
    ("tpu", "39.1b, sequence parallel, Adafactor"),
    ("tpu", "small, short sequences, full"),
    ("gpu", "BERT base, MNLI"),
}

ON_TPUS = {  # what is changed of `wide`
    "1f1b": {},
    "2bw that recomputes": {"pipeline.semantics": "2bw", "pipeline.recompute": "full", "data.global_batch_size": 32},
    "2bw": {"pipeline.semantics": "2bw", "data.global_batch_size": 32},
    "products in rings": {
        "mesh.data": 1,
        "mesh.tensor": 2,
        "mesh.sequence_parallel": True,
        "mesh.collective_matmul": True,
    },
    "long sequences": {"model.seq_len": 8192, "data.global_batch_size": 8},
    "bert": {"model.family": "bert", "model.dropout": 0.1, "model.post_norm": True, "pipeline.recompute": "selective"},
}
ON_GPUS = {  # likewise
    "1f1b": {},
    "sequence parallelism": {"mesh.data": 1, "mesh.tensor": 2, "mesh.sequence_parallel": True},
    "zb_h1, dropout": {"pipeline.schedule": "zb_h1", "model.dropout": 0.1, "pipeline.recompute": "selective"},
    "2bw": {"pipeline.semantics": "2bw", "data.global_batch_size": 32},
}


def wide() -> Config:
    config = Config()
    config.model.num_layers, config.model.hidden_size, config.model.num_heads = 8, 512, 8
    config.model.seq_len, config.model.vocab_size, config.model.dtype = 1024, 16384, "bfloat16"
    config.mesh.data, config.mesh.pipe = 2, 2
    config.pipeline.num_microbatches, config.data.global_batch_size = 4, 64
    return config


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.long] * (case != "bert")) for case in ON_TPUS])
def test_prediction_is_near_what_xla_assigns_on_tpus(case: str) -> None:
    pytest.importorskip("libtpu", reason="compiling for TPUs takes libtpu, of the extra `aot`")
    config = replaced(wide(), ON_TPUS[case]).validate()
    expected = compiled_bytes(config, "tpu:v5e:2x2")[0]
    assert predicted_bytes(config, "tpu:v5e:2x2") == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.long
@needs_cuda_plugin
@pytest.mark.parametrize("case", ON_GPUS)
def test_prediction_is_near_what_xla_assigns_on_gpus(case: str) -> None:
    """Copies of the stash, of sums or of versions would be told here, which are many times the tolerance."""
    config = replaced(wide(), ON_GPUS[case]).validate()
    expected = compiled_bytes(config, "gpu:h100:1x4")[0]
    assert predicted_bytes(config, "gpu:h100:1x4") == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("platform", "case"),
    [(platform, case) for platform, cases in CASES_ON.items() for case in cases if (platform, case) not in MISSES],
)
def test_prediction_is_near_what_the_study_found(platform: str, case: str) -> None:
    result = read(STUDY[platform], CASES_ON[platform])[case]
    predicted = predicted_bytes(make_config(CASES[case]), result["topology"])
    assert predicted == pytest.approx(result["compiled_bytes"], rel=TOLERANCE)
    if (platform, case) not in HOST_MISSES:
        predicted = predicted_host_bytes(make_config(CASES[case]), result["topology"])
        assert predicted == pytest.approx(result.get("compiled_host_bytes", 0), rel=HOST_TOLERANCE)


@pytest.mark.parametrize("chip", ["v5e", "v5p"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_memory_on_tpus_grows_linearly_with_the_sequence(chip: str, recompute: str) -> None:
    results = read(STUDY["tpu"], LONG)
    lengths = 2048, 8192, 32768
    first, second, third = (
        results[f"2,048 wide, sequences of {length:,}, {chip}, {recompute}"]["compiled_bytes"] for length in lengths
    )
    extrapolated = second + (second - first) / (8192 - 2048) * (32768 - 8192)
    assert third == pytest.approx(extrapolated, rel=0.05)


@pytest.mark.parametrize("platform", CASES_ON)
def test_the_table_of_the_docs_is_of_the_results(platform: str) -> None:
    results = read(STUDY[platform], CASES_ON[platform])
    assert list(results) == list(CASES_ON[platform])
    assert table(results) in (STUDIES / "memory.md").read_text(encoding="utf-8")


def test_results_of_cases_that_have_changed_are_not_used(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, case = next(iter(CASES.items()))
    monkeypatch.setitem(CASES, name, MemoryCase(case.config, case.topology, f"{case.changes} train.seed=1"))
    assert name not in read(STUDY["tpu"], CASES)
    assert read(tmp_path / "none.jsonl", CASES) == {}


def test_what_does_not_compile_is_told() -> None:
    pytest.importorskip("libtpu", reason="compiling for TPUs takes libtpu, of the extra `aot`")
    config = Config()
    config.mesh.data = 2
    with pytest.raises(DeviceError, match="tpu:v5e:2x2: mesh data=2 × pipe=1 × tensor=1 needs 2 devices"):
        compiled_bytes(config.validate(), "tpu:v5e:2x2")
