"""The examples that a run trains on and is evaluated on, for any objective, ready for the loader."""

import dataclasses

from fiddlex.config import Config, DataConfig
from fiddlex.config.config import LABELLED
from fiddlex.data.continuations import ContinuationExamples, read_continuations
from fiddlex.data.corpus import TokenStream, load_corpus, reading, text_tokenizer
from fiddlex.data.examples import ExampleSource, HeldoutExamples, NextTokenExamples
from fiddlex.data.labelled_texts import TaskRow, read_classification, read_multiple_choice, split_table
from fiddlex.data.masked_examples import MaskedExamples
from fiddlex.data.sentence_pairs import SentencePairExamples
from fiddlex.data.tables import Table, UnfitFileError
from fiddlex.data.task_examples import ClassificationExamples, MultipleChoiceExamples
from fiddlex.data.tokenizers import Tokenizer, require_special
from fiddlex.errors import DataError


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """Examples for training and for evaluation.

    Attributes:
      source: `data.source`.
      description: lines for the log.
      fingerprint: a text that identifies the training data.
      train: training examples.
      heldout: held-out examples, as they are in epoch 0; None when nothing is held out.
      tokenizer: the tokenizer that made the tokens; None for token files whose tokenizer the config does not name.
      bytes_per_token: bytes per token of the held-out text; the loss per token divided by this is the loss per byte.
        None when the text is unknown or a full evaluation does not score all its tokens.
    """

    source: str
    description: str
    fingerprint: str
    train: ExampleSource
    heldout: ExampleSource | None
    tokenizer: Tokenizer | None
    bytes_per_token: float | None = None


def load_dataset(config: Config) -> Dataset:
    """Reads the data that a validated config names, and checks all of it.

    Raises:
      ConfigError, DataError: when data is missing, wrong, too short or outside the vocabulary.
    """
    return _labelled(config) if config.model.task in LABELLED else _text(config)


def _text(config: Config) -> Dataset:
    """Examples of running text."""
    task, data, length = config.model.task, config.data, config.model.seq_len
    continues = data.eval_source.startswith("jsonl:")
    of_text = dataclasses.replace(data, eval_source="", eval_fraction=0.0) if continues else data
    # For masked objectives every document makes an example, however short.
    corpus = load_corpus(of_text, vocab_size=config.model.vocab_size, seq_len=length if task == "lm" else 1)
    description, heldout = corpus.describe(), corpus.heldout
    train = (
        NextTokenExamples(corpus.train.tokens, length)
        if task == "lm"
        else _masked(config, corpus.train, corpus.tokenizer)
    )
    examples: ExampleSource | None = None
    if continues:
        examples = _continuations(config, corpus.tokenizer)
        description = f"{corpus.source}: {corpus.train.describe()} for training\n{examples.describe()}"
    elif len(heldout) > 1 and task == "lm":
        examples = HeldoutExamples(heldout.tokens, length, stride=data.eval_stride)
    elif len(heldout) > 1:
        examples = _masked_heldout(config, heldout, corpus.tokenizer)
    return Dataset(
        corpus.source,
        description,
        corpus.fingerprint(),
        train,
        examples,
        corpus.tokenizer,
        bytes_per_token=heldout.bytes_per_token if task == "lm" else None,
    )


def _masked(config: Config, stream: TokenStream, tokenizer: Tokenizer | None) -> ExampleSource:
    task, data, length = config.model.task, config.data, config.model.seq_len
    if task == "mlm":
        return MaskedExamples(
            stream,
            tokenizer,
            seq_len=length,
            mask_fraction=data.mask_fraction,
            whole_words=data.whole_words,
            pack=data.pack,
            seed=data.seed,
        )
    return SentencePairExamples(
        stream,
        tokenizer,
        objective=task,
        seq_len=length,
        mask_fraction=data.mask_fraction,
        whole_words=data.whole_words,
        seed=data.seed,
    )


def _masked_heldout(config: Config, stream: TokenStream, tokenizer: Tokenizer | None) -> ExampleSource:
    data = config.data
    try:
        return _masked(config, stream, tokenizer)
    except DataError as error:
        where = f"data.eval_source={data.eval_source!r}"
        if not data.eval_source:
            where = f"what data.eval_fraction={data.eval_fraction} holds out of data.source={data.source!r}"
        raise DataError(f"{where}: {error} Hold out more, or name another data.eval_source.") from error


def _continuations(config: Config, tokenizer: Tokenizer | None) -> ContinuationExamples:
    data = config.data
    with reading("data.eval_source", data.eval_source):
        if tokenizer is None:
            raise DataError(
                f"{data.eval_source!r} is text, and the tokenizer of data.source={data.source!r} is not known "
                f"(model.vocab_size={config.model.vocab_size}, not the 256 of bytes). Set data.tokenizer to the JSON "
                "file of the tokenizer that made those tokens."
            )
        table = read_continuations(data.eval_source, skip_bad_lines=data.skip_bad_lines)
        return ContinuationExamples(table, tokenizer=tokenizer, seq_len=config.model.seq_len)


def _labelled(config: Config) -> Dataset:
    """Examples of labelled texts."""
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
    return Dataset(data.source, description, train.fingerprint(), train, heldout, tokenizer)


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
