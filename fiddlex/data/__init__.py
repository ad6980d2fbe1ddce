"""Data: documents → tokens → examples → batches.

`load_corpus` reads what a config names and splits it, an `ExampleSource` cuts the tokens into examples, and `Loader`
and `eval_batches` make batches of them.
"""

from fiddlex.data.corpus import Corpus, TokenStream, load_corpus
from fiddlex.data.documents import Document, read_stdlib, read_text
from fiddlex.data.examples import ExampleSource, HeldoutExamples, NextTokenExamples
from fiddlex.data.loader import Batch, Loader, eval_batches
from fiddlex.data.masked_examples import MaskedExamples
from fiddlex.data.masking import max_masked
from fiddlex.data.sentence_pairs import SentencePairExamples
from fiddlex.data.token_files import open_token_file
from fiddlex.data.tokenizers import (
    ByteTokenizer,
    JsonTokenizer,
    Tokenizer,
    decode_pieces,
    make_tokenizer,
    require_special,
)
from fiddlex.data.vocabulary import SpecialTokens, Vocabulary

__all__ = [
    "Batch",
    "ByteTokenizer",
    "Corpus",
    "Document",
    "ExampleSource",
    "HeldoutExamples",
    "JsonTokenizer",
    "Loader",
    "MaskedExamples",
    "NextTokenExamples",
    "SentencePairExamples",
    "SpecialTokens",
    "TokenStream",
    "Tokenizer",
    "Vocabulary",
    "decode_pieces",
    "eval_batches",
    "load_corpus",
    "make_tokenizer",
    "max_masked",
    "open_token_file",
    "read_stdlib",
    "read_text",
    "require_special",
]
