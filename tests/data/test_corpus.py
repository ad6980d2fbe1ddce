import dataclasses
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from fiddlex.config import DataConfig
from fiddlex.data import ByteTokenizer, Corpus, Document, TokenStream, load_corpus, token_stream
from fiddlex.data.corpus import encode_documents, split_documents
from fiddlex.errors import DataError

NAMES = st.lists(st.text("abc/.", min_size=1, max_size=6), unique=True, min_size=2, max_size=20)


def load(source: str | Path, *, vocab_size: int = 256, seq_len: int = 4, **fields) -> Corpus:
    return load_corpus(DataConfig(source=str(source), **fields), vocab_size=vocab_size, seq_len=seq_len)


def write_tokens(path: Path, ids, dtype: str = "<u2") -> Path:
    path.parent.mkdir(exist_ok=True)
    np.array(ids, dtype).tofile(path)
    return path


def save_word_tokenizer(path: Path, num_words: int) -> Path:
    model = tokenizers.models.WordLevel({"[UNK]": 0, **{f"w{i}": i for i in range(1, num_words)}}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path))
    return path


@pytest.fixture
def folder(tmp_path):
    for i in range(40):
        path = tmp_path / "texts" / f"{i % 3}" / f"{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"document-{i}.")
    return tmp_path / "texts"


@given(names=NAMES, fraction=st.floats(0.01, 0.99))
def test_split_parts_the_documents(names, fraction):
    documents = [Document(name, name) for name in names]
    train, heldout = split_documents(documents, fraction=fraction)
    assert train
    assert heldout
    assert not {document.name for document in train} & {document.name for document in heldout}
    assert sorted(names) == sorted(document.name for document in train + heldout)
    assert [document for document in documents if document in train] == train
    assert [document for document in documents if document in heldout] == heldout


@given(names=NAMES, more=NAMES)
def test_split_of_a_document_does_not_depend_on_the_others(names, more):
    fixed = [Document(f"file{i}", "") for i in range(20)]  # some on either side: no side needs one
    first = split_documents([*fixed, *(Document(name, "") for name in names)], fraction=0.3)[1]
    every = dict.fromkeys([*names, *more])
    second = split_documents([*(Document(name, "other text") for name in every), *fixed], fraction=0.3)[1]
    chosen = {document.name for document in second}
    assert {document.name for document in first} == chosen & {*names, *(document.name for document in fixed)}


def test_split_takes_about_the_share():
    documents = [Document(f"{i}.txt", "") for i in range(2000)]
    assert 140 < len(split_documents(documents, fraction=0.1)[1]) < 260
    assert split_documents(documents, fraction=0.0) == (documents, [])


@given(st.lists(st.text(st.characters(blacklist_characters="\0", codec="utf-8"), min_size=1), max_size=6))
def test_documents_are_joined_by_the_separator(texts):
    stream = encode_documents([Document(str(i), text) for i, text in enumerate(texts)], ByteTokenizer())
    assert stream.tokens.dtype == np.uint8
    assert bytes(stream.tokens) == b"\0".join(text.encode() for text in texts)
    assert stream.num_bytes == sum(len(text.encode()) for text in texts)
    assert stream.num_documents == len(texts)


@given(lengths=st.lists(st.integers(0, 9), max_size=9), chunk=st.integers(1, 20), last_separator=st.booleans())
def test_documents_of_a_stream_lie_between_separators(lengths, chunk, last_separator):
    documents = [[i + 1] * length for i, length in enumerate(lengths)]
    tokens = [token for document in documents for token in (*document, 0)]
    stream = TokenStream(np.array(tokens if last_separator else tokens[:-1], "<u2"), separator=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_stream, "_READ_AT_ONCE", chunk)
        bounds = stream.bounds
    assert bounds.dtype == np.int64
    assert [stream.tokens[start:stop].tolist() for start, stop in bounds] == [d for d in documents if d]
    assert TokenStream(stream.tokens).bounds.tolist() == ([[0, len(stream)]] if len(stream) else [])


def test_documents_of_text_are_files_and_what_separators_part(tmp_path):
    for name, text in {"a": "one", "b": "two\0three", "c": "four"}.items():
        (tmp_path / f"{name}.txt").write_text(text)
    part = load(f"text:{tmp_path / 'c.txt'}", eval_fraction=0.5, seq_len=1)
    assert part.train.bounds.tolist() == part.heldout.bounds.tolist() == [[0, 2]]
    train = load(f"text:{tmp_path / 'b.txt'}", eval_fraction=0).train
    assert [bytes(train.tokens[start:stop]) for start, stop in train.bounds] == [b"two", b"three"]
    train = load(f"text:{tmp_path}", eval_fraction=0).train
    assert [bytes(train.tokens[start:stop]) for start, stop in train.bounds] == [b"one", b"four"]  # b is binary


def test_documents_of_token_files_are_found_by_the_separator_if_it_is_known(tmp_path):
    path = write_tokens(tmp_path / "train.bin", [4, 5, 1, 6, 7, 8, 1])
    write_tokens(tmp_path / "val.bin", [1, 9])
    spec = str(tmp_path / "tokenizer.json")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"[SEP]": 1, "w": 9}, unk_token="w")).save(spec)
    known = load(f"tokens:{tmp_path}", vocab_size=10, tokenizer=spec)
    other = load(f"tokens:{path}", vocab_size=10, tokenizer=spec, eval_source=f"tokens:{tmp_path}")
    for corpus in (known, other):
        assert corpus.train.bounds.tolist() == [[0, 2], [3, 6]]
        assert corpus.heldout.bounds.tolist() == [[1, 2]]
    unknown = load(f"tokens:{tmp_path}", vocab_size=10)
    assert unknown.train.bounds.tolist() == [[0, 7]]
    assert unknown.fingerprint() == known.fingerprint()
    assert unknown.describe() == known.describe()


def test_batched_encoding_joins_like_one_batch(monkeypatch):
    documents = [Document(str(i), f"text {i}") for i in range(7)]
    whole = encode_documents(documents, ByteTokenizer()).tokens
    monkeypatch.setattr("fiddlex.data.corpus._ENCODED_AT_ONCE", 3)
    np.testing.assert_array_equal(encode_documents(documents, ByteTokenizer()).tokens, whole)


def test_folder_is_split_by_file_without_leakage(folder):
    corpus = load(f"text:{folder}", eval_fraction=0.2)
    train = bytes(corpus.train.tokens).split(b"\0")
    heldout = bytes(corpus.heldout.tokens).split(b"\0")
    assert sorted(train + heldout) == sorted(f"document-{i}.".encode() for i in range(40))
    assert 2 <= len(heldout) <= 16
    assert (corpus.train.num_documents, corpus.heldout.num_documents) == (len(train), len(heldout))


def test_folder_loads_the_same_twice_and_keeps_files_on_their_side(folder):
    first, again = load(f"text:{folder}"), load(f"text:{folder}")
    np.testing.assert_array_equal(first.train.tokens, again.train.tokens)
    np.testing.assert_array_equal(first.heldout.tokens, again.heldout.tokens)
    (folder / "a new file.txt").write_text("new")
    more = load(f"text:{folder}")
    assert set(bytes(first.heldout.tokens).split(b"\0")) <= set(bytes(more.heldout.tokens).split(b"\0"))
    assert set(bytes(first.train.tokens).split(b"\0")) <= set(bytes(more.train.tokens).split(b"\0"))


def test_single_file_gives_its_last_share(tmp_path):
    (tmp_path / "a.txt").write_text("é" * 80 + "x" * 20)
    corpus = load(f"text:{tmp_path / 'a.txt'}", eval_fraction=0.2)
    assert bytes(corpus.train.tokens).decode() == "é" * 80
    assert bytes(corpus.heldout.tokens).decode() == "x" * 20
    assert corpus.describe() == (
        f"text:{tmp_path / 'a.txt'}: 160 bytes, 160 tokens for training; 20 bytes, 20 tokens held out"
    )


def test_nothing_held_out(folder):
    corpus = load(f"text:{folder}", eval_fraction=0.0)
    assert len(corpus.heldout) == 0
    assert corpus.heldout.bytes_per_token is None
    assert corpus.train.num_documents == 40
    assert corpus.describe().endswith("; nothing held out")


def test_bytes_per_token(tmp_path):
    words = save_word_tokenizer(tmp_path / "tokenizer.json", 100)
    (tmp_path / "a.txt").write_text(" ".join(["w7"] * 100))
    corpus = load(f"text:{tmp_path / 'a.txt'}", vocab_size=100, tokenizer=str(words), eval_fraction=0.5)
    assert corpus.train.tokens.dtype == np.uint8
    assert set(corpus.train.tokens) == set(corpus.heldout.tokens) == {7}
    assert corpus.heldout.bytes_per_token == pytest.approx(3, abs=0.05)


def test_tokens_take_the_smallest_dtype_of_the_vocabulary(tmp_path):
    words = save_word_tokenizer(tmp_path / "tokenizer.json", 300)
    (tmp_path / "a.txt").write_text("w299 w1 " * 10)
    corpus = load(f"text:{tmp_path / 'a.txt'}", vocab_size=300, tokenizer=str(words), eval_fraction=0.0)
    assert corpus.train.tokens.dtype == np.uint16
    assert corpus.train.tokens[0] == 299


def test_eval_source_is_held_out_whole_and_nothing_of_the_source(folder, tmp_path):
    (tmp_path / "eval.txt").write_text("held out")
    corpus = load(f"text:{folder}", eval_source=f"text:{tmp_path / 'eval.txt'}")
    assert bytes(corpus.heldout.tokens) == b"held out"
    assert corpus.train.num_documents == 40


def test_stdlib():
    corpus = load("stdlib", seq_len=128)
    assert corpus.heldout.num_documents >= 5
    assert corpus.train.num_documents > 10 * corpus.heldout.num_documents
    assert corpus.train.tokens.dtype == np.uint8
    assert 0.99 < corpus.heldout.bytes_per_token < 1
    assert b"class JSONDecoder" in bytes(np.concatenate([corpus.train.tokens, corpus.heldout.tokens]))
    assert corpus.describe().startswith(f"stdlib: {corpus.train.num_documents} files, ")


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_token_file_gives_its_last_share(tmp_path, dtype):
    path = write_tokens(tmp_path / "all.bin", np.arange(100), np.dtype(dtype).newbyteorder("<"))
    corpus = load(f"tokens:{path}", vocab_size=100, token_dtype=dtype, eval_fraction=0.1)
    assert corpus.train.tokens.tolist() == list(range(90))
    assert corpus.heldout.tokens.tolist() == list(range(90, 100))
    assert isinstance(corpus.train.tokens, np.memmap)
    assert corpus.heldout.bytes_per_token is None
    assert corpus.describe() == f"tokens:{path}: 90 tokens for training; 10 tokens held out"


@pytest.mark.parametrize("field", ["source", "eval_source"])
def test_token_file_of_the_other_dtype_is_refused_with_its_field(tmp_path, field):
    good = write_tokens(tmp_path / "good.bin", range(100))
    wide = write_tokens(tmp_path / "wide.bin", range(100), "<u4")
    sources = {"source": f"tokens:{good}", "eval_source": f"tokens:{good}", field: f"tokens:{wide}"}
    with pytest.raises(DataError, match=rf"^data\.{field}: .*wide\.bin was made of uint32 .* Set data\.token_dtype="):
        load(vocab_size=100, **sources)


def test_token_folder(tmp_path):
    write_tokens(tmp_path / "train.bin", range(50))
    write_tokens(tmp_path / "val.bin", range(50, 60))
    for fraction in (0.0, 0.5):
        corpus = load(f"tokens:{tmp_path}", vocab_size=100, eval_fraction=fraction)
        assert corpus.train.tokens.tolist() == list(range(50))
        assert corpus.heldout.tokens.tolist() == list(range(50, 60))


def test_token_folder_without_val_is_cut(tmp_path):
    write_tokens(tmp_path / "train.bin", range(50))
    corpus = load(f"tokens:{tmp_path}", vocab_size=100, eval_fraction=0.2)
    assert corpus.heldout.tokens.tolist() == list(range(40, 50))


def test_token_folder_as_eval_source_gives_its_val(tmp_path):
    train = write_tokens(tmp_path / "other.bin", range(20))
    write_tokens(tmp_path / "folder" / "train.bin", range(50))
    with pytest.raises(DataError, match=r"folder/val\.bin: there is no such file"):
        load(f"tokens:{train}", vocab_size=100, eval_source=f"tokens:{tmp_path / 'folder'}")
    write_tokens(tmp_path / "folder" / "val.bin", range(60, 70))
    corpus = load(f"tokens:{train}", vocab_size=100, eval_source=f"tokens:{tmp_path / 'folder'}")
    assert corpus.train.tokens.tolist() == list(range(20))
    assert corpus.heldout.tokens.tolist() == list(range(60, 70))


def test_tokenizer_of_token_files(tmp_path):
    path = write_tokens(tmp_path / "all.bin", range(50))
    words = save_word_tokenizer(tmp_path / "tokenizer.json", 60)
    assert load(f"tokens:{path}", vocab_size=60).tokenizer is None
    assert isinstance(load(f"tokens:{path}", vocab_size=256).tokenizer, ByteTokenizer)
    assert load(f"tokens:{path}", vocab_size=60, tokenizer=str(words)).tokenizer.vocab_size == 60


def test_text_evaluation_of_unknown_tokens(tmp_path):
    path = write_tokens(tmp_path / "all.bin", range(50))
    with pytest.raises(
        DataError, match=r"data\.eval_source: 'stdlib' is text, .*model\.vocab_size=60.*data\.tokenizer"
    ):
        load(f"tokens:{path}", vocab_size=60, eval_source="stdlib")


def test_tokenizer_larger_than_the_model(tmp_path):
    words = save_word_tokenizer(tmp_path / "tokenizer.json", 300)
    with pytest.raises(DataError, match=r"data\.tokenizer='bytes' has 256 tokens.*Set model\.vocab_size=256"):
        load("stdlib", vocab_size=255)
    with pytest.raises(DataError, match=r"has 300 tokens, more than model\.vocab_size=256.*Set model\.vocab_size=300"):
        load("stdlib", tokenizer=str(words))


@pytest.mark.parametrize(("unknown", "told"), [(5, False), (6, True)])
def test_text_that_a_tokenizer_was_not_made_for_is_told(tmp_path, caplog, unknown, told):
    words = save_word_tokenizer(tmp_path / "tokenizer.json", 60)
    (tmp_path / "a.txt").write_text("w1 " * (100 - unknown) + "other " * unknown)
    source = f"text:{tmp_path / 'a.txt'}"
    load(source, vocab_size=60, tokenizer=str(words), eval_fraction=0.0)
    message = (
        f"{source}: of 100 tokens 6.0% are the unknown token of data.tokenizer={words}, which was made for other text. "
        "Train one on text like this, or name another."
    )
    assert caplog.messages == [message] * told


def test_tokens_outside_the_vocabulary(tmp_path):
    path = write_tokens(tmp_path / "all.bin", [1, 2, 100, 3])
    with pytest.raises(DataError, match=r"token 2 is 100, outside the vocabulary of model\.vocab_size=100"):
        load(f"tokens:{path}", vocab_size=100)


def test_too_short_to_train(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 10)
    source = f"text:{tmp_path / 'a.txt'}"
    assert len(load(source, seq_len=8, eval_fraction=0.0).train) == 10
    assert len(load(source, seq_len=9, eval_fraction=0.0).train) == 10
    with pytest.raises(DataError, match=r"has 10 tokens for training, .*model\.seq_len\+1=11\. Use more data"):
        load(source, seq_len=10, eval_fraction=0.0)
    with pytest.raises(DataError, match=r"has 5 tokens for training, .*data\.eval_fraction \(now 0\.5\)"):
        load(source, seq_len=8, eval_fraction=0.5)


def test_too_short_to_evaluate(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 20)
    (tmp_path / "eval.txt").write_text("x")
    source = f"text:{tmp_path / 'a.txt'}"
    with pytest.raises(DataError, match=r"a\.txt' has 1 held-out tokens, .*\(now 0\.05\), or data\.eval_fraction=0"):
        load(source)
    with pytest.raises(DataError, match=r"eval\.txt' has 1 held-out tokens"):
        load(source, eval_source=f"text:{tmp_path / 'eval.txt'}")


@pytest.mark.parametrize("field", ["source", "eval_source"])
@pytest.mark.parametrize("kind", ["text", "tokens"])
def test_missing_source(tmp_path, monkeypatch, field, kind):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=rf"^data\.{field}: {kind}:{tmp_path}/nowhere: there is no such file"):
        load(**{"source": "stdlib", field: f"{kind}:nowhere"})


@pytest.mark.parametrize(("kind", "reader"), [("text", "pathlib.Path.read_bytes"), ("tokens", "numpy.memmap")])
def test_file_that_may_not_be_read(tmp_path, monkeypatch, kind, reader):
    def refuse(path, **_):
        raise PermissionError(13, "Permission denied", str(path))

    path = write_tokens(tmp_path / "file", range(50))
    monkeypatch.setattr(reader, refuse)
    with pytest.raises(DataError, match=rf"^data\.source: cannot read {path}: Permission denied\. Check the path and"):
        load(f"{kind}:{path}")


def test_sizes_in_words():
    stream = TokenStream(np.zeros(1_234_567, np.uint8), num_bytes=1_234_567, num_documents=1)
    assert stream.describe() == "1 file, 1.18 MiB, 1,234,567 tokens"
    assert dataclasses.replace(stream, num_documents=2).describe().startswith("2 files, ")
