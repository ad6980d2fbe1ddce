"""lm-evaluation-harness on fiddlex's model against its own `hf`, and what it does with bad requests.

It needs the packages of `third_party/lm_eval/compare.py`, which the extra `test` does not bring (docs/tests.md).
"""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from fiddlex.errors import ConfigError, DataError
from tests.small_run import ENVIRONMENT, ROOT

for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
    os.environ.setdefault(name, "1")

for package in ("lm_eval", "transformers", "torch", "accelerate"):
    pytest.importorskip(package)

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.api.registry import get_model  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402

from fiddlex.config.overrides import replaced  # noqa: E402
from fiddlex.data import make_tokenizer  # noqa: E402
from fiddlex.tools.harness import FiddlexLM  # noqa: E402
from fiddlex.tools.harness_tasks import task_manager  # noqa: E402
from fiddlex.tools.harness_tokens import HarnessTokenizer  # noqa: E402
from fiddlex.train.inference.sampling import SamplingConfig  # noqa: E402
from fiddlex.train.run.transfer.conversion import import_folder  # noqa: E402
from fiddlex.train.run.transfer.result import load_generator  # noqa: E402
from fiddlex.train.trainer import load_trainer  # noqa: E402
from third_party.lm_eval import compare  # noqa: E402

# The harness and its data sets leave files to the garbage collector, and warn of their own use of transformers.
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("name", ["GPT-2", "Llama"])
def test_numbers_are_those_of_transformers(name: str, tmp_path: pathlib.Path) -> None:
    for found in compare.compare(name, tmp_path).values():
        assert found.metrics < 1e-4
        assert found.log_likelihoods < 1e-4
        assert found.num_log_likelihoods == 6 * compare.NUM_DOCUMENTS
        assert found.num_greedy > 5
        assert found.greedy == 0
        assert found.num_texts == compare.NUM_DOCUMENTS
        assert found.texts == 0


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A random Llama with its tokenizer, on two devices."""
    folder = tmp_path_factory.mktemp("harness")
    compare.make_folder(folder / "hf", "Llama")
    import_folder(folder / "hf", folder / "run", lambda config: replaced(config, {"mesh.data": 2}))
    return folder / "run"


def request(kind: str, *arguments: Any) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def test_requests(workdir: pathlib.Path) -> None:
    model = get_model("fiddlex").create_from_arg_string(f"workdir={workdir},mesh.data=1,batch_size=3,seed=5")
    assert isinstance(model, FiddlexLM)
    assert model.loglikelihood([]) == []
    with pytest.raises(ConfigError, match="batch_size=auto:4 must be a number of sequences, or auto"):
        FiddlexLM(str(workdir), batch_size="auto:4")
    with pytest.raises(DataError, match=r"'a' \+ '….* has \d+ tokens, more than model\.seq_len=64"):
        model.loglikelihood([request("loglikelihood", "a", "import os " * 64)])
    merged = request("loglikelihood", "x retur", "n")  # `return` is one token; the harness' own `hf` raises too
    with pytest.raises(DataError, match=r"request 'x retur' \+ 'n' has nothing to score"):
        model.loglikelihood([request("loglikelihood", "a", " b"), merged])
    drawn = {"until": ["\n"], "temperature": 1.0, "max_gen_toks": 8}
    first, second = model.generate_until([request("generate_until", "def ", drawn)] * 2)
    assert first != second  # each request draws with a seed of its own
    assert model.generate_until([request("generate_until", "def ", drawn)]) == [first]
    likeliest = [request("generate_until", "def ", {"max_gen_toks": 80})]  # more than a sequence
    assert model.generate_until(likeliest) == model.generate_until(likeliest)
    with pytest.raises(ConfigError, match="generation_kwargs num_beams=2"):
        model.generate_until([request("generate_until", "def ", {"num_beams": 2})])


def test_a_pair_is_scored_as_by_an_evaluation(workdir: pathlib.Path, tmp_path: pathlib.Path) -> None:
    pair = {"context": "import os", "continuation": " and sys"}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pair))
    fields = {"data.eval_source": f"jsonl:{tmp_path / 'pairs.jsonl'}"}
    (predicted,) = load_trainer(workdir, lambda config: replaced(config, fields)).predictions()
    requests = [request("loglikelihood", *pair.values())]
    ((expected, _),) = HFLM(str(workdir.parent / "hf"), dtype="float32", device="cpu").loglikelihood(requests)
    ((found, _),) = FiddlexLM(str(workdir)).loglikelihood(requests)
    assert [found, predicted["log_likelihoods"][0]] == pytest.approx([expected] * 2, rel=1e-4)


def test_white_space_alone_comes_after_the_prefix_token(tmp_path: pathlib.Path) -> None:
    compare.make_folder(tmp_path / "hf", "GPT-2")
    import_folder(tmp_path / "hf", tmp_path / "run")
    model = FiddlexLM(str(tmp_path / "run"))
    requests = [request("loglikelihood", "  ", "x"), request("loglikelihood", "", "  x")]
    (found, _), (expected, _) = model.loglikelihood(requests)
    assert found == expected < -1


def test_texts_end_where_transformers_ends_them(tmp_path: pathlib.Path) -> None:
    """A list of `eos_token_id` in `generation_config.json` names the third token of a greedy text."""
    compare.make_folder(folder := tmp_path / "hf", "Llama")
    encode = HarnessTokenizer(make_tokenizer(spec := str(folder / "tokenizer.json")), spec).encode
    prompts = [f"{word} " for word in ("def", "import", "class", "return", "x =", "for", "if not", "with")]
    options = {"max_gen_toks": 12, "do_sample": False, "until": []}
    requests = [request("generate_until", prompt, options) for prompt in prompts]
    import_folder(folder, tmp_path / "run")
    texts = FiddlexLM(str(tmp_path / "run")).generate_until(requests)
    prompt, ids = next(
        (prompt, ids) for prompt, text in zip(prompts, texts, strict=True) if len(ids := encode(text)) > 5
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, ids[3]]}))  # ids[0] is <s>
    import_folder(folder, tmp_path / "listed")
    ended = FiddlexLM(str(tmp_path / "listed")).generate_until(requests)
    assert ended != texts
    assert ended == HFLM(str(folder), dtype="float32", device="cpu").generate_until(requests)
    (drawn,) = load_generator(tmp_path / "listed")[0].complete([prompt], 12, SamplingConfig(temperature=0.0))
    assert (drawn.end, drawn.num_tokens) == ("document", ids.index(ids[3]))


def test_more_examples_than_a_task_has(workdir: pathlib.Path, tmp_path: pathlib.Path) -> None:
    compare.write_tasks(tmp_path, workdir.parent / "hf")
    names = ["fiddlex_choice"]
    assert task_manager(names, str(tmp_path), compare.NUM_DOCUMENTS).load(names)["tasks"].keys() == {*names}
    more = task_manager(names, str(tmp_path), compare.NUM_DOCUMENTS + 1)
    with pytest.raises(ConfigError, match=r"--num_fewshot=41: the task fiddlex_choice has 40 examples for a context"):
        more.load(names)


def test_a_tokenizer_that_is_not_known(workdir: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    other = {"data.tokenizer": "bytes"}
    with pytest.raises(
        ConfigError, match=r"was trained on tokens:/x, whose tokenizer is not known\. Set data\.tokenizer"
    ):
        FiddlexLM(str(workdir), **other | {"data.source": "tokens:/x"})
    FiddlexLM(str(workdir), **other)
    assert "data.tokenizer=bytes has 256 tokens, and the model has 700: is it the model's tokenizer?" in caplog.text


def test_the_binary(workdir: pathlib.Path, tmp_path: pathlib.Path) -> None:
    compare.write_tasks(tmp_path, workdir.parent / "hf")
    line = [sys.executable, ROOT / "experiments/harness.py", f"--workdir={workdir}", f"--include_path={tmp_path}"]
    tasks = "--tasks=fiddlex_choice,fiddlex_rolling"
    whole = [*line, tasks, "--limit=6", f"--output={tmp_path / 'out.json'}", "--config.mesh.data=1"]
    environment = {**ENVIRONMENT, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(whole, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout.splitlines()[-1])
    assert printed["step"] == 0
    assert printed["results"].keys() == {"fiddlex_choice", "fiddlex_rolling"}
    assert "|fiddlex_choice" in done.stdout
    written = json.loads((tmp_path / "out.json").read_text())
    assert len(written["samples"]["fiddlex_rolling"]) == 6
    done = subprocess.run([*line, "--tasks=no_such"], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 2
    assert "--tasks=no_such: lm-evaluation-harness has no 'no_such'. It lists its tasks" in done.stderr
    assert "Traceback" not in done.stderr
    for wrong, message, status in (
        (f"--output={tmp_path}", f"--output={tmp_path} cannot be written: Is a directory", 2),
        (f"--workdir={tmp_path}", f"--workdir={tmp_path} is not the directory of a training run", 1),  # as everywhere
    ):
        done = subprocess.run([*line, tasks, wrong], capture_output=True, text=True, env=environment, timeout=300)
        assert done.returncode == status
        assert message in done.stderr
        assert "Traceback" not in done.stderr
