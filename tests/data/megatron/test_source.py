import collections
import dataclasses

import numpy as np
import plain
import pytest

from fiddlex.config import Config
from fiddlex.data import EvalBatches, Loader, load_dataset
from fiddlex.errors import DataError

VOCABULARY, LENGTH = 4000, 8


def documents_of(first, count, *, lengths=range(3, 30)):
    """Documents of ids that all differ, from `first` on."""
    rng, documents = np.random.default_rng(first), []
    for length in rng.choice(list(lengths), count):
        documents.append(list(range(first, first + int(length))))
        first += int(length)
    return documents


@pytest.fixture
def prefixes(tmp_path):
    made = {}
    for name, first in (("a", 0), ("b", 2000)):
        made[name] = documents_of(first, 100)
        plain.write(tmp_path / name, [[document] for document in made[name]])
    return tmp_path, made


def config_of(source, **data):
    config = Config()
    config.model.seq_len, config.model.vocab_size = LENGTH, VOCABULARY
    config.data = dataclasses.replace(config.data, source=source, global_batch_size=4, split="80,15,5", **data)
    return config.without_unused().validate()


def loader_of(config):
    dataset = load_dataset(config)
    return Loader(dataset.train, global_batch_size=4, seed=config.data.seed, vocab_size=VOCABULARY)


def rows_of(batches):
    return [row for batch in batches for row in np.append(batch["tokens"], batch["targets"][:, -1:], axis=1).tolist()]


def test_training_takes_each_example_of_the_first_part_once_in_an_epoch(prefixes):
    folder, made = prefixes
    config = config_of(f"megatron:{folder / 'a'}", seed=3)
    order = np.arange(80)
    np.random.RandomState(3).shuffle(order)
    expected = plain.samples(made["a"], order, LENGTH)
    expected = expected[: len(expected) // 4 * 4]
    dataset, loader = load_dataset(config), loader_of(config)
    rows = rows_of(loader.batch(step) for step in range(len(dataset.train) // 4))
    assert len(rows) == len({tuple(row) for row in rows})
    whole = plain.samples(made["a"], order, LENGTH)
    assert {tuple(row) for row in rows} <= {tuple(row) for row in whole}
    assert len(dataset.train) == len(whole)
    assert rows != expected  # the loader shuffles them


def test_evaluation_scores_each_token_of_the_second_part_once(prefixes):
    folder, made = prefixes
    dataset = load_dataset(config_of(f"megatron:{folder / 'a'}"))
    batches = EvalBatches(dataset.heldout, batch_size=4, vocab_size=VOCABULARY)
    scored = sorted(int(t) for b in batches for t in b["targets"][b["weights"] > 0])
    assert scored == [token for document in made["a"][80:95] for token in document][1:]
    assert dataset.description == (
        f"megatron:{folder / 'a'}: 80 documents, {sum(map(len, made['a'][:80])):,} tokens for training; "
        f"15 documents, {sum(map(len, made['a'][80:95])):,} tokens held out; 5 documents left out"
    )


def test_a_blend_holds_its_shares_and_each_source_its_epochs(prefixes):
    folder, _ = prefixes
    config = config_of(f"megatron:0.75:{folder / 'a'},0.25:{folder / 'b'}")
    dataset, loader = load_dataset(config), loader_of(config)
    sizes = [len(source) for source in dataset.train.sources]
    steps = 2 * max(sizes)
    seen = [[], []]
    for step in range(steps):
        for row in rows_of([loader.batch(step)]):
            seen[row[0] >= 2000].append(tuple(row))
        assert abs(len(seen[0]) - 0.75 * 4 * (step + 1)) <= 1
    for rows, size in zip(seen, sizes, strict=True):
        for start in range(0, len(rows) - size, size):  # an epoch of the source
            assert len(set(rows[start : start + size])) == size
    alone = loader_of(config_of(f"megatron:{folder / 'b'}"))
    expected = rows_of(alone.batch(step) for step in range(-(-len(seen[1]) // 4)))
    assert seen[1] == [tuple(row) for row in expected[: len(seen[1])]]


def test_a_blend_is_evaluated_on_all_that_it_holds_out(prefixes):
    folder, made = prefixes
    dataset = load_dataset(config_of(f"megatron:3:{folder / 'a'},1:{folder / 'b'}"))
    batches = list(EvalBatches(dataset.heldout, batch_size=4, vocab_size=VOCABULARY))
    scored = sorted(int(t) for b in batches for t in b["targets"][b["weights"] > 0])
    assert scored == sorted(
        token for name in "ab" for token in [t for document in made[name][80:95] for t in document][1:]
    )
    early = {bool(row[0] >= 2000) for row in batches[0]["tokens"]}
    assert early == {True, False}
    assert "0.75 of " in dataset.description


def test_any_step_is_reached_without_those_before(prefixes):
    folder, _ = prefixes
    source = f"megatron:0.6:{folder / 'a'},0.4:{folder / 'b'}"
    one, other = loader_of(config_of(source)), loader_of(config_of(source))
    before = [one.batch(step) for step in range(300)]
    after = list(other.iterate(290, num_steps=10))
    for expected, batch in zip(before[290:], after, strict=True):
        assert all(np.array_equal(expected[name], batch[name]) for name in expected)


def test_the_fingerprint_tells_of_tokens_boundaries_splits_and_weights(prefixes, tmp_path):
    folder, made = prefixes
    plain.write(tmp_path / "ids", [[d] for d in [[9, *made["a"][0][1:]], *made["a"][1:]]])
    joined = [made["a"][0] + made["a"][1], [], *made["a"][2:]]
    plain.write(tmp_path / "edges", [[d] for d in joined])
    sources = [
        f"megatron:{folder / 'a'}",
        f"megatron:{tmp_path / 'ids'}",
        f"megatron:{tmp_path / 'edges'}",
        f"megatron:1:{folder / 'a'},2:{folder / 'b'}",
        f"megatron:2:{folder / 'a'},1:{folder / 'b'}",
    ]
    prints = [load_dataset(config_of(source)).fingerprint for source in sources]
    split = config_of(sources[0])
    split.data.split = "90,5,5"
    prints.append(load_dataset(split).fingerprint)
    assert collections.Counter(prints).most_common(1)[0][1] == 1
    assert load_dataset(config_of(f"megatron:4:{folder / 'a'},2:{folder / 'b'}")).fingerprint == prints[4]


def test_other_sources_to_evaluate_on(prefixes, tmp_path):
    folder, made = prefixes
    a, b = f"megatron:{folder / 'a'}", f"megatron:{folder / 'b'}"
    np.arange(50, dtype="<u2").tofile(tmp_path / "flat.bin")
    every = [sum(map(len, made[name])) for name in "ab"]
    for source, eval_source, scored, trained in (
        (a, b, every[1] - 1, every[0]),
        (a, f"tokens:{tmp_path / 'flat.bin'}", 49, every[0]),
        (f"tokens:{tmp_path / 'flat.bin'}", b, every[1] - 1, 50),
    ):
        dataset = load_dataset(config_of(source, eval_source=eval_source))
        batches = EvalBatches(dataset.heldout, batch_size=4, vocab_size=VOCABULARY)
        assert sum(b["weights"].sum() for b in batches) == scored
        assert len(dataset.train) == (trained - 1) // LENGTH


def test_masked_objectives_take_the_documents_of_the_index(tmp_path, numbered):
    """Documents of two sequences; ids tell which document a token is of, as there is no separator."""
    documents = [[list(range(s, s + 3)), list(range(s + 3, s + 7))] for s in range(5, 1005, 10)]
    plain.write(tmp_path / "a", documents)
    for objective in ("mlm", "mlm_sop"):
        config = config_of(f"megatron:{tmp_path / 'a'}")
        config.model.family, config.model.objective = "bert", objective
        config.model.seq_len, config.model.vocab_size, config.data.tokenizer = 10, 2000, numbered._path
        config.data.pack = False
        dataset = load_dataset(config)
        assert (len(dataset.train), len(dataset.heldout)) == (80, 15)
        for index in range(80):
            example = dataset.train.example(index, epoch=0)
            restored = example["tokens"].copy()
            restored[example["masked_positions"][example["weights"] > 0]] = example["targets"][example["weights"] > 0]
            text = [int(t) for t in restored if t >= 5]
            start = 5 + 10 * index
            assert sorted(text) == list(range(start, start + 7))
        assert "100" not in dataset.description
        assert "80 documents" in dataset.description


@pytest.mark.parametrize(
    ("documents", "changes", "message"),
    [
        ([[5, 4000]] * 20, {}, r"token 1 is 4000, outside the vocabulary of model\.vocab_size=4000"),
        (
            [[1] * 9],
            {"split": "1,1"},
            r"has 0 tokens for training in 0 documents, and one example takes model",
        ),
        (
            [[1] * 9] * 10,
            {},
            r"split=969,30,1 of .* holds out 0 of 10 documents, .* without an evaluation: data\.split=1",
        ),
        ([[1] * 9], {"split": "1", "source": "/no/such"}, r"data\.source: megatron:/no/such: there is no file .*\.idx"),
        (
            [[1] * 9],
            {"split": "1", "eval_source": "megatron:/no"},
            r"data\.eval_source: megatron:/no: there is no",
        ),
    ],
)
def test_messages(tmp_path, documents, changes, message):
    plain.write(tmp_path / "a", [[document] for document in documents])
    config = config_of(f"megatron:{changes.pop('source', tmp_path / 'a')}")
    config.data = dataclasses.replace(config.data, **{"split": "969,30,1"} | changes)
    with pytest.raises(DataError, match=message):
        load_dataset(config)


def test_a_bad_id_that_samples_miss_is_found_in_its_batch(tmp_path, monkeypatch):
    from fiddlex.data import token_stream

    monkeypatch.setattr(token_stream.TokenStream, "pieces", lambda self: iter(()))
    plain.write(tmp_path / "a", [[[1] * 9 + [-7] + [1] * 9]], "int16")
    config = config_of(f"megatron:{tmp_path / 'a'}")
    config.data.split = "1"
    with pytest.raises(DataError, match="outside the vocabulary"):
        loader_of(config).batch(0)
