"""Data: documents or tables → tokens → examples (`ExampleSource`) → batches (`Loader`, `EvalBatches`)."""

from fiddlex.data.continuations import (
    Continuation,
    ContinuationExamples,
    ContinuationRows,
    ScoredEnds,
    read_continuations,
)
from fiddlex.data.corpus import Corpus, load_corpus
from fiddlex.data.dataset import Dataset, load_dataset
from fiddlex.data.documents import Document, read_stdlib, read_text
from fiddlex.data.examples import ExampleSource, HeldoutExamples, NextTokenExamples
from fiddlex.data.labelled_texts import TaskRow, read_classification, read_multiple_choice, split_table
from fiddlex.data.loader import Batch, EvalBatches, Loader
from fiddlex.data.masked_examples import MaskedExamples
from fiddlex.data.scores import score_continuations
from fiddlex.data.sentence_pairs import SentencePairExamples
from fiddlex.data.statistics import class_shares, majority_share, wilson_interval
from fiddlex.data.tables import Table
from fiddlex.data.task_examples import ClassificationExamples, MultipleChoiceExamples
from fiddlex.data.token_files import open_token_file
from fiddlex.data.token_kinds import SpecialTokens, Vocabulary
from fiddlex.data.token_stream import TokenStream
from fiddlex.data.tokenizers import (
    ByteTokenizer,
    JsonTokenizer,
    PieceDecoder,
    Tokenizer,
    make_tokenizer,
    require_special,
)
from fiddlex.models.task_sizes import example_fields, max_masked

__all__ = [
    "Batch",
    "ByteTokenizer",
    "ClassificationExamples",
    "Continuation",
    "ContinuationExamples",
    "ContinuationRows",
    "Corpus",
    "Dataset",
    "Document",
    "EvalBatches",
    "ExampleSource",
    "HeldoutExamples",
    "JsonTokenizer",
    "Loader",
    "MaskedExamples",
    "MultipleChoiceExamples",
    "NextTokenExamples",
    "PieceDecoder",
    "ScoredEnds",
    "SentencePairExamples",
    "SpecialTokens",
    "Table",
    "TaskRow",
    "TokenStream",
    "Tokenizer",
    "Vocabulary",
    "class_shares",
    "example_fields",
    "load_corpus",
    "load_dataset",
    "majority_share",
    "make_tokenizer",
    "max_masked",
    "open_token_file",
    "read_classification",
    "read_continuations",
    "read_multiple_choice",
    "read_stdlib",
    "read_text",
    "require_special",
    "score_continuations",
    "split_table",
    "wilson_interval",
]
