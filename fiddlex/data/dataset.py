"""The examples that a run trains on and is evaluated on, for any objective, ready for the loader."""

import dataclasses
from pathlib import Path

from fiddlex.config import Config, DataConfig
from fiddlex.config.config import LABELLED
from fiddlex.config.values.source import is_megatron
from fiddlex.data.blended_examples import BlendedExamples, InterleavedExamples
from fiddlex.data.caching import keep_samples
from fiddlex.data.corpus import corpus_tokenizer, load_corpus, load_heldout, reading, text_tokenizer
from fiddlex.data.counts import DataCounts
from fiddlex.data.examples import ExampleSource, NextTokenExamples
from fiddlex.data.labelled_texts import TaskRow, read_classification, read_multiple_choice, split_table
from fiddlex.data.megatron.order import document_order
from fiddlex.data.megatron.packing import PackedDocuments
from fiddlex.data.megatron.source import load_megatron
from fiddlex.data.objectives import continuation_examples, heldout_examples, masked_examples
from fiddlex.data.tables import Table, UnfitFileError
from fiddlex.data.task_examples import ClassificationExamples, MultipleChoiceExamples
from fiddlex.data.token_stream import TokenStream
from fiddlex.data.tokenizers import Tokenizer, require_special, tokenizer_digest
from fiddlex.errors import DataError


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """Examples for training and for evaluation."""

    source: str  # `data.source`
    description: str  # lines for the log
    fingerprint: str  # identifies the training data
    train: ExampleSource | BlendedExamples  # several sources with their weights for a blend
    heldout: ExampleSource | None  # as they are in epoch 0; None when nothing is held out
    # The one that made the tokens; None for token files whose tokenizer the config does not name.
    tokenizer: Tokenizer | None
    heldout_fingerprint: str = ""  # identifies the held-out data; empty when nothing is held out
    # None when the text is unknown, or a full evaluation does not score all its tokens.
    heldout_text: TokenStream | None = None
    # How many training samples were fetched and prepared, and how.
    counts: DataCounts = dataclasses.field(default_factory=DataCounts)

    @property
    def sources(self) -> tuple[ExampleSource, ...]:
        return self.train.sources if isinstance(self.train, BlendedExamples) else (self.train,)

    def bytes_per_token(self, num_scored: int) -> float | None:
        """Bytes per token of the first `num_scored` targets of the held-out text; None when the text is unknown."""
        text = self.heldout_text
        if text is None or text.num_bytes is None:
            return None
        if self.tokenizer is not None and num_scored + 1 < len(text):  # an evaluation of data.eval_batches
            text = text.first(num_scored + 1, self.tokenizer)
        return text.bytes_per_token

    @property
    def facts(self) -> dict[str, object]:
        """What identifies the data, under names for people; the processes of a run must agree on it."""
        return {
            f"the fingerprint of data.source={self.source}": self.fingerprint,
            "the fingerprint of the held-out data (data.eval_source, or a share of data.source)": (
                self.heldout_fingerprint
            ),
        }

    def digests(self, config: Config) -> dict[str, str]:
        """What identifies the data whatever their path, by the fields of `config` that name them."""
        data = config.data
        return {
            "data.source": f"{data.source.partition(':')[0]} {self.fingerprint}",
            "data.eval_source": f"{data.eval_source.partition(':')[0]} {self.heldout_fingerprint}",
            "data.tokenizer": tokenizer_digest(data.tokenizer),
        }


def load_dataset(config: Config, *, shared: Path | None = None) -> Dataset:
    """Reads the data that a validated config names, and checks all of it; `shared` is as in `load_corpus`.

    Raises:
      ConfigError, DataError: when data is missing, wrong, too short or outside the vocabulary.
    """
    if config.model.task in LABELLED:
        return _labelled(config)
    dataset = _megatron(config, shared) if is_megatron(config.data.source) else _text(config, shared)
    keep_samples(config, dataset.sources, fingerprint=dataset.fingerprint, counts=dataset.counts)
    return dataset


def _text(config: Config, shared: Path | None) -> Dataset:
    data, length = config.data, config.model.seq_len
    is_lm = config.model.task == "lm"
    # For masked objectives every document makes an example, however short.
    of_text = _without_continuations(data)
    corpus = load_corpus(of_text, vocab_size=config.model.vocab_size, seq_len=length if is_lm else 1, shared=shared)
    train: ExampleSource = (
        NextTokenExamples(corpus.train.tokens, length)
        if is_lm
        else masked_examples(config, corpus.train, corpus.tokenizer)
    )
    description, heldout = corpus.describe(), corpus.heldout
    examples: ExampleSource | None
    heldout_fingerprint = heldout.fingerprint()
    if _continues(data):
        examples = continuation_examples(config, corpus.tokenizer)
        heldout_fingerprint = examples.fingerprint()
        description = f"{corpus.source}: {corpus.train.describe()} for training\n{examples.describe()}"
    else:
        examples = heldout_examples(config, heldout, corpus.tokenizer)
    return Dataset(
        corpus.source,
        description,
        corpus.fingerprint(),
        train,
        examples,
        corpus.tokenizer,
        heldout_fingerprint,
        heldout_text=heldout if is_lm else None,
    )


def _megatron(config: Config, shared: Path | None) -> Dataset:
    data, length, vocab_size = config.data, config.model.seq_len, config.model.vocab_size
    is_lm = config.model.task == "lm"
    tokenizer = corpus_tokenizer(data, vocab_size)
    with reading("data.source", data.source):
        corpus = load_megatron(
            _without_continuations(data), vocab_size=vocab_size, seq_len=length if is_lm else 1, by_sequence=is_lm
        )
    trains: list[ExampleSource] = [
        PackedDocuments(part.data, document_order(part.data, 0, part.edges[1], seed=data.seed), length)
        if is_lm
        else masked_examples(config, part.train, tokenizer)
        for part in corpus.parts
    ]
    description, stream = corpus.describe(), None
    heldout: ExampleSource | None
    if _continues(data):
        heldout = continuation_examples(config, tokenizer)
        heldout_fingerprint = heldout.fingerprint()
        description += f"\n{heldout.describe()}"
    elif data.eval_source:
        stream = load_heldout(data, tokenizer, vocab_size=vocab_size, shared=shared)
        heldout_fingerprint = stream.fingerprint()
        heldout = heldout_examples(config, stream, tokenizer)
        description += f"\n{data.eval_source}: {stream.describe()} held out"
    else:
        heldout_fingerprint = " ".join(part.heldout.fingerprint() for part in corpus.parts)
        found = [heldout_examples(config, part.heldout, tokenizer) for part in corpus.parts]
        sources = [examples for examples in found if examples is not None]
        heldout = InterleavedExamples(sources) if len(sources) > 1 else next(iter(sources), None)
    return Dataset(
        corpus.source,
        description,
        corpus.fingerprint(),
        trains[0] if len(trains) == 1 else BlendedExamples(trains, corpus.weights),
        heldout,
        tokenizer,
        heldout_fingerprint,
        heldout_text=stream if is_lm else None,
    )


def _continues(data: DataConfig) -> bool:
    """Whether the held-out data are texts with continuations, which are read apart from the corpus."""
    return data.eval_source.startswith("jsonl:")


def _without_continuations(data: DataConfig) -> DataConfig:
    if not _continues(data):
        return data
    return dataclasses.replace(data, eval_source="", eval_fraction=0.0, split="1,0,0")


def _labelled(config: Config) -> Dataset:
    data = config.data
    tokenizer = text_tokenizer(data, config.model.vocab_size)
    with reading("data.source", data.source):
        table = _read(data.source, config)
        rows, heldout_rows = split_table(table, fraction=0.0 if data.eval_source else data.eval_fraction)
        train = _examples(config, rows, tokenizer)
    description, heldout = f"{table.describe()}\nto train on: {train.describe()}", None
    if data.eval_source:
        heldout = _heldout_file(config, tokenizer)
    elif len(heldout_rows):
        with reading("data.source", data.source):
            heldout = _examples(config, heldout_rows, tokenizer)
    if heldout is not None:
        description += f"\nheld out: {heldout.describe()}"
    heldout_fingerprint = heldout.fingerprint() if heldout else ""
    return Dataset(data.source, description, train.fingerprint(), train, heldout, tokenizer, heldout_fingerprint)


def _heldout_file(config: Config, tokenizer: Tokenizer) -> ClassificationExamples | MultipleChoiceExamples:
    """The examples of `data.eval_source`, which may be left over from a config for other data."""
    with reading("data.eval_source", config.data.eval_source):
        try:
            return _examples(config, _read(config.data.eval_source, config), tokenizer)
        except UnfitFileError as error:
            raise DataError(
                f"{error} data.eval_source may be another file, or empty (--config.data.eval_source=) to hold out "
                f"data.eval_fraction={config.data.eval_fraction} of data.source."
            ) from error


def _read(source: str, config: Config) -> Table[TaskRow]:
    reader = read_classification if config.model.task == "classification" else read_multiple_choice
    return reader(source, config.data)


def _examples(
    config: Config, table: Table[TaskRow], tokenizer: Tokenizer
) -> ClassificationExamples | MultipleChoiceExamples:
    data: DataConfig = config.data
    special, length = require_special(tokenizer), config.model.seq_len
    if config.model.task == "classification":
        return ClassificationExamples(
            table,
            classes=data.classes,
            tokenizer=tokenizer,
            special=special,
            seq_len=length,
            truncate=data.truncate,
        )
    return MultipleChoiceExamples(table, tokenizer=tokenizer, special=special, seq_len=length, truncate=data.truncate)
