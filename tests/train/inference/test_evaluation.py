"""Evaluations of a GPT against plain ones: windows that overlap, and texts to be continued."""

import json
import math
import pathlib

import jax
import numpy as np
import pytest
import tokenizers

from fiddlex.config import Config
from fiddlex.data import ScoredEnds, load_corpus, wilson_interval
from fiddlex.data.dataset import load_dataset
from fiddlex.errors import DataError
from fiddlex.train.inference.evaluation import summarise
from fiddlex.train.trainer import Trainer
from tests import reference


@pytest.fixture
def config(tiny_config: Config) -> Config:
    tiny_config.model.vocab_size, tiny_config.data.eval_batches, tiny_config.optimizer.learning_rate = 256, 0, 1e-2
    tiny_config.mesh.data, tiny_config.mesh.pipe, tiny_config.mesh.tensor = 2, 2, 2
    tiny_config.pipeline.num_microbatches = 4
    return tiny_config


def log_probabilities(trainer: Trainer, tokens: np.ndarray) -> np.ndarray:
    """Of every next token, [row, position, vocabulary], by the plain model."""
    weights = reference.unstack(trainer.weights())
    return np.asarray(jax.nn.log_softmax(reference.logits_fn(weights, tokens, None, trainer.config)))


def test_a_stride_gives_every_token_the_context_that_it_asks_for(config: Config) -> None:
    config.data.eval_stride, config.data.eval_fraction = 5, 0.01
    trainer = Trainer(config)
    list(trainer.steps(10))
    stream = load_corpus(config.data, vocab_size=256, seq_len=16).heldout
    tokens = stream.tokens.astype(np.int32)
    # One window for every target, of the tokens that a window of the stride has before it.
    losses = []
    for target in range(1, len(tokens)):
        start = 0 if target <= 16 else -(-(target - 16) // 5) * 5
        window = tokens[start:target]
        losses.append((np.pad(window, (0, 16 - len(window))), len(window) - 1, tokens[target]))
    inputs, places, targets = map(np.array, zip(*losses, strict=True))
    scores = log_probabilities(trainer, inputs)[np.arange(len(places)), places]
    record, expected = trainer.evaluate(), -scores[np.arange(len(targets)), targets]
    assert record["eval_tokens"] == len(targets)
    assert record["eval_loss"] == pytest.approx(expected.mean(), rel=1e-5)
    assert record["eval_accuracy"] == pytest.approx((scores.argmax(-1) == targets).mean())
    per_byte = expected.mean() * len(tokens) / stream.num_bytes
    assert record["eval_loss_per_byte"] == pytest.approx(per_byte, rel=1e-5)
    config.data.eval_stride = 0
    assert Trainer(config).evaluate()["eval_tokens"] == len(targets)


@pytest.mark.parametrize(("num_examples", "stride"), [(3, 0), (3, 5), (None, 0)])
def test_the_loss_per_byte_is_that_of_the_text_that_was_scored(
    num_examples: int | None, stride: int, config: Config, text_file: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Code has several bytes in a token, and Greek, of which the tokenizer knows nothing, two tokens in a letter."""
    made, path = tokenizers.ByteLevelBPETokenizer(), tmp_path / "heldout.txt"
    made.train([str(text_file)], vocab_size=512)
    made.save(str(tmp_path / "tokenizer.json"))
    text = (
        "def main(arguments): return argparse.ArgumentParser(arguments)\n" * 9
        + "Μῆνιν ἄειδε θεὰ Πηληϊάδεω Ἀχιλῆος " * 99
    )
    path.write_text(text)
    config.model.vocab_size, config.data.tokenizer = 512, str(tmp_path / "tokenizer.json")
    config.data.eval_source, config.data.eval_stride = f"text:{path}", stride
    dataset = load_dataset(config)
    assert dataset.heldout is not None
    weights = [
        dataset.heldout.example(i, epoch=0)["weights"].sum() for i in range(num_examples or len(dataset.heldout))
    ]
    scores = np.array([[[2.5 * weight, weight, 0]] for weight in weights])
    last = int(sum(weights))  # the last token that was scored
    num_bytes = len(text[: made.encode(text).offsets[last][1]].encode())
    record = summarise(scores, ("tokens",), "lm", dataset)
    assert record["eval_loss"] == pytest.approx(2.5)
    assert record["eval_loss_per_byte"] == pytest.approx(2.5 * (last + 1) / num_bytes)


def test_continuations_are_scored_as_the_plain_model_does(config: Config, tmp_path: pathlib.Path) -> None:
    lines = [
        {"context": context, "choices": choices, "label": label}
        for context, choices, label in [
            ("def ", ["f(x):", "xx"], 0),
            ("import os, a long context that loses its start, ", ["sys", "zzz", "argparse"], "A"),
            ("", ["return", "\x01\x02"], 1),
            ("if x", [" is None", ":"], 1),
        ]
    ]
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config.data.eval_source = f"jsonl:{path}"
    trainer = Trainer(config)
    list(trainer.steps(20))
    totals, answers, num_bytes = [], [], 0
    for line in lines:
        label, sums = {"A": 0}.get(line["label"], line["label"]), []
        for choice in line["choices"]:
            ids = np.frombuffer((line["context"] or "\0").encode() + choice.encode(), np.uint8).astype(np.int32)[-17:]
            scores = log_probabilities(trainer, np.pad(ids[:-1], (0, 17 - len(ids)))[None])[0]
            places = np.arange(len(ids) - 1 - len(choice), len(ids) - 1)
            sums.append(scores[places, ids[places + 1]].sum())
        totals.append(sums)
        answers.append(label)
        num_bytes += len(line["choices"][label])
    likelihood = sum(sums[label] for sums, label in zip(totals, answers, strict=True))
    right = [int(np.argmax(sums)) == label for sums, label in zip(totals, answers, strict=True)]
    record = trainer.evaluate()
    assert record["eval_lines"] == 4
    assert record["eval_loss"] == pytest.approx(-likelihood / num_bytes, rel=1e-5)
    assert record["eval_perplexity_per_byte"] == pytest.approx(math.exp(-likelihood / num_bytes), rel=1e-4)
    assert record["eval_accuracy"] == np.mean(right)
    assert (record["eval_accuracy_low"], record["eval_accuracy_high"]) == wilson_interval(sum(right), 4)
    assert record["eval_accuracy_per_byte"] == np.mean(
        [
            int(np.argmax([s / len(c) for s, c in zip(sums, line["choices"], strict=True)])) == label
            for sums, line, label in zip(totals, lines, answers, strict=True)
        ]
    )

    found = trainer.predictions()
    assert [line["line"] for line in found] == [1, 2, 3, 4]
    assert [line["label"] for line in found] == answers
    assert [line["guess"] for line in found] == [int(np.argmax(sums)) for sums in totals]
    assert [line["right"] for line in found] == right
    for line, sums in zip(found, totals, strict=True):
        assert line["log_likelihoods"] == pytest.approx(sums, rel=1e-5)

    # The same as tokens, more often than a batch holds: `Trainer.scores` takes any examples.
    texts = [((line["context"] or "\0") + choice, len(choice)) for line in lines for choice in line["choices"]]
    sequences = [(np.frombuffer(text.encode(), np.uint8), length) for text, length in texts] * 4
    scores_E3 = trainer.scores(ScoredEnds(sequences, seq_len=16))[:, 0]
    assert -scores_E3[:, 0] == pytest.approx([each for sums in totals for each in sums] * 4, rel=1e-5)
    assert scores_E3[:, 1].tolist() == [length for _, length in texts] * 4


def test_predictions_of_last_words(config: Config, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("if x is", "\n", "import o", "a  ")))
    path.write_text(path.read_text().replace('{"text": "\\n"}\n', "\n"))
    config.data.eval_source = f"jsonl:{path}"
    trainer = Trainer(config)
    record, found = trainer.evaluate(), trainer.predictions()
    assert [line["line"] for line in found] == [1, 3, 4]
    assert np.mean([line["right"] for line in found]) == record["eval_accuracy"]
    total = sum(line["log_likelihoods"][0] for line in found)
    assert -total / (len(" is") + len(" o") + len("a")) == pytest.approx(record["eval_loss_per_byte"], rel=1e-5)
    assert not any({"label", "guess"} & line.keys() for line in found)


def test_bad_lines_are_told_before_the_first_step(config: Config, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"text": "two words"}\nnot json\n')
    config.data.eval_source = f"jsonl:{path}"
    with pytest.raises(DataError, match=r"data\.eval_source: jsonl:.*lines\.jsonl, line 2: 'not json' is not JSON"):
        Trainer(config)
    config.data.skip_bad_lines = True
    trainer = Trainer(config)
    assert "1 line, 1 passed over (1 not JSON)" in trainer.dataset.description
    assert trainer.evaluate()["eval_lines"] == 1
