"""The examples of running text for each objective: next token, masked tokens, sentence pairs, continuations."""

import functools

from fiddlex.config import Config
from fiddlex.config.values.source import kind_of
from fiddlex.data.continuations import ContinuationExamples, read_continuations
from fiddlex.data.corpus import reading
from fiddlex.data.examples import ExampleSource, HeldoutExamples
from fiddlex.data.masked_examples import MaskedExamples
from fiddlex.data.sentence_pairs import SentencePairExamples
from fiddlex.data.token_stream import TokenStream
from fiddlex.data.tokenizers import Tokenizer
from fiddlex.errors import DataError


def masked_examples(config: Config, stream: TokenStream, tokenizer: Tokenizer | None) -> ExampleSource:
    """The examples of a masked objective; raises DataError when stream or vocabulary does not suit it."""
    task, data = config.model.task, config.data
    examples = (
        functools.partial(MaskedExamples, pack=data.pack)
        if task == "mlm"
        else functools.partial(SentencePairExamples, objective=task)
    )
    return examples(
        stream,
        tokenizer,
        seq_len=config.model.seq_len,
        mask_fraction=data.mask_fraction,
        whole_words=data.whole_words,
        seed=data.seed,
    )


def heldout_examples(config: Config, stream: TokenStream, tokenizer: Tokenizer | None) -> ExampleSource | None:
    """The examples of held-out text; None when there is none."""
    data = config.data
    if len(stream) < 2:
        return None
    if config.model.task == "lm":
        return HeldoutExamples(stream.tokens, config.model.seq_len, stride=data.eval_stride)
    try:
        return masked_examples(config, stream, tokenizer)
    except DataError as error:
        where = f"data.eval_source={data.eval_source!r}"
        if not data.eval_source:
            share = "data.split" if kind_of(data.source).split else "data.eval_fraction"
            value = data.split if share == "data.split" else data.eval_fraction
            where = f"what {share}={value} holds out of data.source={data.source!r}"
        raise DataError(f"{where}: {error} Hold out more, or name another data.eval_source.") from error


def continuation_examples(config: Config, tokenizer: Tokenizer | None) -> ContinuationExamples:
    """The examples of `data.eval_source=jsonl:PATH`, texts with their continuations."""
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
