"""BERTs of transformers: their numbers against a BERT in numpy that reads the tensors by name, and all older forms."""

import dataclasses
import json
import logging
import math
import pathlib
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.numpy

from fiddlex.config import Config
from fiddlex.config.overrides import replaced
from fiddlex.data.dataset import Dataset
from fiddlex.data.tokenizers import JsonTokenizer
from fiddlex.errors import CheckpointError
from fiddlex.interop.folder_tokenizer import copy_tokenizer
from fiddlex.models.task_sizes import example_fields
from fiddlex.train import loop
from fiddlex.train.run.transfer.conversion import export_workdir, import_folder
from fiddlex.train.run.workdir import read_config
from fiddlex.train.trainer import Trainer, load_trainer
from tests.interop.folders import BERT, make_folder, on_eight

Arrays = dict[str, np.ndarray]


def linear(tensors: Arrays, name: str, x: np.ndarray) -> np.ndarray:
    return x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]


def norm(tensors: Arrays, name: str, x: np.ndarray) -> np.ndarray:
    x = x - x.mean(-1, keepdims=True)
    return (
        x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-12) * tensors[f"{name}.weight"] + tensors[f"{name}.bias"]
    )


def gelu(x: np.ndarray) -> np.ndarray:
    return x * (1 + np.vectorize(math.erf)(x / np.sqrt(2))) / 2


def encoded(t: Arrays, tokens: np.ndarray, types: np.ndarray) -> np.ndarray:
    """What leaves the layers for one text without padding, [S, 32]."""
    x = t["bert.embeddings.word_embeddings.weight"][tokens] + t["bert.embeddings.token_type_embeddings.weight"][types]
    x = norm(t, "bert.embeddings.LayerNorm", x + t["bert.embeddings.position_embeddings.weight"][: len(tokens)])
    for i in range(4):
        layer = f"bert.encoder.layer.{i}"
        q, k, v = (
            linear(t, f"{layer}.attention.self.{each}", x).reshape(len(x), 4, 8).swapaxes(0, 1)
            for each in ("query", "key", "value")
        )
        scores = np.exp(q @ k.swapaxes(1, 2) / np.sqrt(8))
        heads = (scores / scores.sum(-1, keepdims=True)) @ v
        y = linear(t, f"{layer}.attention.output.dense", heads.swapaxes(0, 1).reshape(len(x), 32))
        x = norm(t, f"{layer}.attention.output.LayerNorm", x + y)
        y = linear(t, f"{layer}.output.dense", gelu(linear(t, f"{layer}.intermediate.dense", x)))
        x = norm(t, f"{layer}.output.LayerNorm", x + y)
    return x


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def masked_scores(t: Arrays, x: np.ndarray) -> np.ndarray:
    y = norm(t, "cls.predictions.transform.LayerNorm", gelu(linear(t, "cls.predictions.transform.dense", x)))
    return log_softmax(y @ t["bert.embeddings.word_embeddings.weight"].T + t["cls.predictions.bias"])


def label_scores(t: Arrays, x: np.ndarray, head: str) -> np.ndarray:
    return log_softmax(linear(t, head, np.tanh(linear(t, "bert.pooler.dense", x[:1])))[0])


@dataclasses.dataclass(frozen=True)
class Examples:
    """Texts of several lengths with padding after them, some of their tokens to be predicted, and a label."""

    config: Config
    classes: int

    def __len__(self) -> int:
        return 12

    def example(self, index: int, *, epoch: int) -> Arrays:
        rng = np.random.default_rng([epoch, index])
        found = {name: np.zeros(shape, dtype) for name, (shape, dtype) in example_fields(self.config).items()}
        used = 10 + 2 * index
        found["tokens"][...] = rng.integers(0, 257, 32)
        found["segments"][:used] = 1
        found["token_types"][7:used] = 1
        if "targets" in found:
            found["masked_positions"][:3] = rng.choice(used, 3, replace=False)
            found["targets"][:3], found["weights"][:3] = rng.integers(0, 257, 3), 1
        if "labels" in found:
            found["labels"][...], found["label_weights"][...] = rng.integers(self.classes), 1
        return found


def losses(config: Config, tensors: Arrays) -> dict[str, float]:
    """The means over all examples, computed in numpy."""
    parts: dict[str, list[float]] = {"masked": [], "label": []}
    examples = Examples(config, max(len(config.data.classes), 2))
    t = {name: x.astype(np.float64) for name, x in tensors.items()}
    for i in range(len(examples)):
        each = examples.example(i, epoch=0)
        used = int(each["segments"].sum())
        x = encoded(t, each["tokens"][:used], each["token_types"][:used])
        if "targets" in each:
            rows = masked_scores(t, x)[each["masked_positions"][:3]]
            parts["masked"] += [-rows[j, each["targets"][j]] for j in range(3)]
        if "classifier.weight" in t:
            parts["label"].append(-label_scores(t, x, "classifier")[each["labels"]])
        elif "labels" in each:  # transformers' class 0: the second text follows; fiddlex's label 1: it follows
            parts["label"].append(-label_scores(t, x, "cls.seq_relationship")[1 - each["labels"]])
    return {name: float(np.mean(found)) for name, found in parts.items() if found}


def evaluated(config: Config, workdir: pathlib.Path) -> dict[str, float]:
    examples = Examples(config, max(len(config.data.classes), 2))
    trainer = Trainer(config, Dataset("random", "", "random", examples, examples, None))
    assert trainer.load(workdir, config)
    return trainer.evaluate()


@pytest.mark.parametrize("name", ["BertForPreTraining", "BertForMaskedLM", "BertForSequenceClassification"])
def test_a_bert_computes_what_its_tensors_say(name: str, tmp_path: pathlib.Path) -> None:
    tensors = make_folder(tmp_path / "hf", name, hidden_act="gelu", dtype="float32")
    # Larger, so that attention is far from even and a mistake in its scores changes the loss.
    tensors = {name: x + 1 if name.endswith("LayerNorm.weight") else 3 * x for name, x in tensors.items()}
    rewrite(tmp_path / "hf", tensors)
    import_folder(tmp_path / "hf", tmp_path / "run", on_eight)
    config = replaced(read_config(tmp_path / "run"), {"data.global_batch_size": 8})
    found, expected = evaluated(config, tmp_path / "run"), losses(config, tensors)
    assert found["eval_loss"] == pytest.approx(sum(expected.values()), rel=1e-5)
    if len(expected) > 1:
        assert found["eval_pair_loss"] == pytest.approx(expected["label"], rel=1e-5)


def rewrite(folder: pathlib.Path, tensors: Arrays) -> None:
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def contents(tensors: Arrays) -> dict[str, bytes]:
    return {name: x.tobytes() for name, x in tensors.items()}


def older(tensors: Arrays) -> Arrays:
    """As the first BERTs were written."""
    renamed = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    found = {}
    for name, x in tensors.items():
        for now, before in renamed.items():
            name = name.replace(now, before)
        found[name] = x
    found["bert.embeddings.position_ids"] = np.arange(32)[None]
    return found


def test_older_forms_of_a_folder_are_read(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "hf"
    tensors = make_folder(folder, "BertForMaskedLM")
    table, bias = tensors["bert.embeddings.word_embeddings.weight"], tensors["cls.predictions.bias"]
    decoder = {"cls.predictions.decoder.weight": table, "cls.predictions.decoder.bias": bias}
    pooler = {"bert.pooler.dense.weight": np.ones((32, 32), np.float32), "bert.pooler.dense.bias": bias[:32]}
    forms = {
        "gamma": older(tensors),
        "copies": tensors | decoder,
        "copies_alone": {name: x for name, x in tensors.items() if x is not table and x is not bias} | decoder,
        "bare": {name.removeprefix("bert."): x for name, x in tensors.items()},
        "pooler": tensors | pooler,
    }
    for form, written in forms.items():
        rewrite(folder, written)
        with caplog.at_level(logging.WARNING):
            import_folder(folder, tmp_path / form)
        export_workdir(tmp_path / form, tmp_path / f"{form}_back", "")
        back = safetensors.numpy.load_file(tmp_path / f"{form}_back" / "model.safetensors")
        assert {name: x.tobytes() for name, x in back.items()} == {name: x.tobytes() for name, x in tensors.items()}, (
            form
        )
        assert ("does not use bert.pooler.dense" in caplog.text) == (form == "pooler")
    for name in decoder:
        rewrite(folder, tensors | decoder | {name: decoder[name] + 1})
        with pytest.raises(CheckpointError, match=rf"not equal, as they must be: {name} and"):
            import_folder(folder, tmp_path / "other")


def test_the_published_berts_keep_the_head_for_pairs(tmp_path: pathlib.Path) -> None:
    """Their config.json says BertForMaskedLM, and their files have the tensors of BertForPreTraining."""
    tensors = make_folder(tmp_path / "hf", "BertForPreTraining", dtype="float32")
    described = json.loads((tmp_path / "hf" / "config.json").read_text()) | {"architectures": ["BertForMaskedLM"]}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(described))
    rewrite(tmp_path / "hf", older(tensors))
    assert import_folder(tmp_path / "hf", tmp_path / "run").model.task == "mlm_nsp"
    export_workdir(tmp_path / "run", tmp_path / "back", "")
    found = safetensors.numpy.load_file(tmp_path / "back" / "model.safetensors")
    assert contents(found) == contents(tensors)
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert written["architectures"] == ["BertForPreTraining"]


@pytest.fixture
def verdicts(tmp_path: pathlib.Path) -> dict[str, Any]:
    """Fields of a config for a small classification of bytes."""
    lines = [f"it rains {i}\tit is {'wet' if i % 2 else 'dry'}\t{'no' if i % 2 else 'yes'}" for i in range(32)]
    (tmp_path / "texts.tsv").write_text("\n".join(["sentence1\tsentence2\tlabel", *lines]) + "\n")
    return {
        "model.objective": "classification",
        "data.source": f"tsv:{tmp_path / 'texts.tsv'}",
        "data.eval_source": f"tsv:{tmp_path / 'texts.tsv'}",
        "data.labels": "no,yes",
        "data.truncate": True,
        "data.global_batch_size": 8,
        "train.num_steps": 2,
        "train.checkpoint_every": 2,
    }


@pytest.mark.parametrize("name", ["BertForPreTraining", "BertForMaskedLM"])
def test_a_task_starts_from_a_folder_as_from_a_workdir(
    name: str, verdicts: dict[str, Any], tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_folder(tmp_path / "hf", name, dtype="float32")
    import_folder(tmp_path / "hf", tmp_path / "run")
    config = replaced(read_config(tmp_path / "run"), verdicts | {"model.seq_len": 24, "mesh.data": 2})
    found = []
    for source in (f"hf:{tmp_path / 'hf'}", str(tmp_path / "run")):
        trainer = Trainer(config)
        with caplog.at_level(logging.INFO):
            trainer.start_from(source)
        found.append(trainer.weights())
    for ours, theirs in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    new = [record.getMessage().rpartition("new: ")[2] for record in caplog.records if "; new: " in record.getMessage()]
    assert len(new) == 2
    assert new[0] == new[1] == ("head.label.classifier." if name == "BertForPreTraining" else "head.label.")
    given = load_trainer(tmp_path / "run").weights()
    np.testing.assert_array_equal(found[0]["embedding"]["positions"], given["embedding"]["positions"][:24])


@pytest.mark.long
def test_a_converted_classifier_evaluates_trains_and_keeps_its_classes(
    verdicts: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    tensors = make_folder(tmp_path / "hf", "BertForSequenceClassification", id2label={"0": "no", "1": "yes"})
    import_folder(tmp_path / "hf", tmp_path / "run")
    config = replaced(read_config(tmp_path / "run"), verdicts)
    assert read_config(tmp_path / "run").data.labels == "no,yes"
    assert load_trainer(tmp_path / "run", lambda _: config).evaluate()["eval_examples"] == 32
    trainer = Trainer(config)
    trainer.start_from(f"hf:{tmp_path / 'hf'}")
    np.testing.assert_array_equal(
        trainer.weights()["head"]["label"]["classifier"]["kernel"], tensors["classifier.weight"].T
    )
    assert loop.train(config, tmp_path / "run").step == 2
    export_workdir(tmp_path / "run", tmp_path / "back", "")
    described = json.loads((tmp_path / "back" / "config.json").read_text())
    assert described["id2label"] == {"0": "no", "1": "yes"}
    assert described["label2id"] == {"no": 0, "yes": 1}


def test_a_conversion_takes_all_weights_or_none(tmp_path: pathlib.Path) -> None:
    make_folder(tmp_path / "hf", "BertForPreTraining")
    with pytest.raises(CheckpointError, match=r"model\.objective is 'mlm', was 'mlm_nsp'"):
        import_folder(tmp_path / "hf", tmp_path / "run", lambda config: replaced(config, {"model.objective": "mlm"}))
    sop = import_folder(tmp_path / "hf", tmp_path / "sop", lambda c: replaced(c, {"model.objective": "mlm_sop"}))
    assert sop.model.task == "mlm_sop"


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "na", "##ive", "Na", "##ï", "##ve", "!", "中"]


@pytest.mark.parametrize(("lower", "ids"), [(None, [5, 6, 10, 11, 1]), (False, [7, 8, 9, 10, 11, 1])])
def test_berts_vocabulary_becomes_a_tokenizer(lower: bool | None, ids: list[int], tmp_path: pathlib.Path) -> None:
    """In lower case, BERT takes accents away: ï is i."""
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    if lower is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": lower}))
    (tmp_path / "run").mkdir()
    path = copy_tokenizer(tmp_path, tmp_path / "run")
    assert path is not None
    tokenizer = JsonTokenizer(path)
    assert tokenizer.encode("Naïve!中x").tolist() == ids
    assert tokenizer.vocabulary.special == (0, 2, 3, 4)
    assert tokenizer.vocab_size == len(WORDS)
    (tmp_path / "vocab.txt").write_text("no\nspecial\n")
    with pytest.raises(CheckpointError, match=r"vocab\.txt is no WordPiece vocabulary \(it has no line \[UNK\]"):
        copy_tokenizer(tmp_path, tmp_path / "other")


def test_a_tokenizer_that_does_not_fit_is_told(tmp_path: pathlib.Path) -> None:
    folder, words = tmp_path / "hf", [*WORDS, *map(str, range(300))]
    make_folder(folder, "BertForMaskedLM")
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"has 312 tokens, and its model has vocab_size=257"):
        import_folder(folder, tmp_path / "run")
    (folder / "vocab.txt").write_text("\n".join(words[:257]) + "\n", encoding="utf-8")
    config = import_folder(folder, tmp_path / "run")
    assert config.data.tokenizer == str(tmp_path / "run" / "huggingface" / "tokenizer.json")
    (tmp_path / "other.txt").write_text("it is [MASK] 12 and 13.")
    config = replaced(config, {"data.source": f"text:{tmp_path / 'other.txt'}", "data.eval_fraction": 0.0})
    Trainer(config).start_from(f"hf:{folder}")
    swapped = json.loads(pathlib.Path(config.data.tokenizer).read_text())
    vocab = swapped["model"]["vocab"]
    vocab["12"], vocab["13"] = vocab["13"], vocab["12"]
    (tmp_path / "swapped.json").write_text(json.dumps(swapped))
    for tokenizer, message in (
        ("bytes", r"data\.tokenizer='bytes', but the model of .* has learnt 257 tokens of its own. Convert it"),
        (str(tmp_path / "swapped.json"), r"numbers 2 of its tokens otherwise .*: '12' is 25 here and 24 there"),
    ):
        with pytest.raises(CheckpointError, match=message):
            Trainer(replaced(config, {"data.tokenizer": tokenizer})).start_from(f"hf:{folder}")


def test_sizes_come_from_the_folder(tmp_path: pathlib.Path) -> None:
    make_folder(tmp_path / "hf", "BertForMaskedLM")
    model = import_folder(tmp_path / "hf", tmp_path / "run").model
    assert (model.family, model.objective, model.post_norm, model.gelu) == ("bert", "mlm", True, "tanh")
    assert (model.layer_norm_epsilon, model.dropout, model.seq_len) == (1e-12, 0.0, BERT["max_position_embeddings"])
