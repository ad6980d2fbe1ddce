"""Examples of two sentences: do they belong together (BERT), are they in order (ALBERT)?

Devlin et al. 2019 (arXiv:1810.04805), section 3.1, task 2, and appendix A.2; Lan et al. 2020 (arXiv:1909.11942),
section 3.1. A "sentence" is a span of text, not a grammatical sentence.

Invariant: an example is a function of seed, epoch and index. Memory holds a few numbers for each document.
"""

import numpy as np

from fiddlex.data.masking import Masker, example_rng
from fiddlex.data.staged_examples import StagedExamples
from fiddlex.data.token_stream import TokenStream
from fiddlex.data.tokenizers import Tokenizer
from fiddlex.errors import DataError
from fiddlex.terminal.readable import counted

_AROUND = 3  # tokens around a pair: [CLS] A [SEP] B [SEP]
_LEAST = 2  # least tokens of a pair


class SentencePairExamples(StagedExamples):
    """[CLS] A [SEP] B [SEP], where B follows A in a document or, half of the time, does not.

    Documents are cut into windows of seq_len − 3 tokens; the last window of a document may be shorter. A last window of
    one token makes no pair and is left out, and so is a document of one token. Each epoch draws a new cut of each
    window into A and B: at the end of one of the window's sentences; if there is no such end, at the start of a word;
    if there is no such start, anywhere.

    Half of the examples, drawn in each epoch, are wrong. With mlm_sop, A and B are swapped. With mlm_nsp, B begins in
    another document, drawn from all others, at a cut drawn in one of its windows, and continues until the example is
    full; the rest of A's window is left out in that epoch. If there is only one document, B begins in another of its
    windows and does not reach into A's window.
    """

    def __init__(
        self,
        stream: TokenStream,
        tokenizer: Tokenizer | None,
        *,
        objective: str,
        seq_len: int,
        mask_fraction: float,
        whole_words: bool,
        seed: int,
    ):
        self._masker = Masker(tokenizer, seq_len=seq_len, mask_fraction=mask_fraction, whole_words=whole_words)
        if seq_len < _AROUND + _LEAST:
            raise DataError(
                f"model.seq_len={seq_len} must be at least {_AROUND + _LEAST} with model.objective={objective}: an "
                "example is a first token and two sentences, each with a token after it."
            )
        self._tokens = stream.tokens
        self._swaps = objective == "mlm_sop"
        self._seq_len = seq_len
        self._room = seq_len - _AROUND
        self._seed = seed
        full, rest = np.divmod(stream.bounds[:, 1] - stream.bounds[:, 0], self._room)
        windows = full + (rest >= _LEAST)
        self._bounds = stream.bounds[windows > 0]
        self._before = np.append(0, np.cumsum(windows[windows > 0]))  # windows before each document
        if not len(self):
            raise DataError(
                f"no document has the two tokens that a pair takes ({counted(len(stream.bounds), 'document')}). Use "
                "more data, or model.objective=mlm."
            )
        if not self._swaps and len(self) == 1:
            raise DataError(
                f"model.objective={objective} takes the second half of a pair from somewhere else, and there is only "
                f"one document of {self._bounds[0, 1] - self._bounds[0, 0]} tokens, no more than an example "
                f"(model.seq_len={seq_len}) holds. Use more data, or model.objective=mlm_sop."
            )

    def __len__(self) -> int:
        return int(self._before[-1])

    def read(self, number: int) -> np.ndarray:
        """The tokens of window `number`, and a last token of its document that makes no window of its own."""
        start, stop, last = self._window(number)
        return np.array(self._tokens[start : last if last == stop + 1 else stop])

    def prepare(self, sample: np.ndarray, index: int, *, epoch: int) -> dict[str, np.ndarray]:
        """Pair `index` as it is drawn in `epoch`; fetches one or two more windows for a B from elsewhere.

        It has the arrays of `Masker.mask`; `segments` int32[seq_len], 1 on both sentences and 0 on padding;
        `token_types` int32[seq_len], 1 on the second sentence and its last separator; `labels` int32[], 1 where B
        follows A and 0 where it does not; `label_weights` float32[], 1.
        """
        rng = example_rng(self._seed, epoch=epoch, index=index)
        text = self._text(index, sample)
        cut = self._cut(text, rng)
        first, second = text[:cut], text[cut:]
        is_right = rng.random() < 0.5
        if not is_right:
            first, second = (second, first) if self._swaps else (first, self._elsewhere(index, cut, rng))
        special, middle = self._masker.special, len(first) + 2
        end = middle + len(second) + 1
        tokens = np.full(self._seq_len, special.pad, np.int32)
        tokens[:end] = np.concatenate([[special.cls], first, [special.sep], second, [special.sep]])
        segments, token_types = np.zeros((2, self._seq_len), np.int32)
        segments[:end] = 1
        token_types[middle:end] = 1
        return {
            **self._masker.mask(tokens, rng),
            "segments": segments,
            "token_types": token_types,
            "labels": np.array(is_right, np.int32),
            "label_weights": np.array(1, np.float32),
        }

    def _document(self, window: int) -> int:
        return int(np.searchsorted(self._before, window, side="right")) - 1

    def _window(self, window: int) -> tuple[int, int, int]:
        """The first token of a window, the one after its last, and the one after the last of its document."""
        document = self._document(window)
        start, last = self._bounds[document].tolist()
        start += int(window - self._before[document]) * self._room
        return start, min(start + self._room, last), last

    def _text(self, window: int, sample: np.ndarray) -> np.ndarray:
        start, stop, _ = self._window(window)
        return self._masker.vocabulary.checked(sample[: stop - start])

    def _cut(self, text: np.ndarray, rng: np.random.Generator) -> int:
        """The first token of B in the text of a window, drawn."""
        ends = self._masker.vocabulary.ends_sentences(text)
        # If several ends follow one another, as in "?!", the window can be cut only after the last.
        places = np.flatnonzero(ends[:-1] & ~ends[1:])
        if not len(places):
            places = np.flatnonzero(self._masker.vocabulary.starts_words(text)[1:])
        if not len(places):
            places = np.arange(len(text) - 1)
        return 1 + int(rng.choice(places))

    def _elsewhere(self, window: int, length: int, rng: np.random.Generator) -> np.ndarray:
        """Text for a B that does not follow the A of `length` tokens at the start of `window`."""
        document, num_documents = self._document(window), len(self._bounds)
        if num_documents > 1:
            drawn = _another(document, num_documents, rng)
            other = int(rng.integers(self._before[drawn], self._before[drawn + 1]))
        else:
            other = _another(window, len(self), rng)
        sample = self.fetch(other)
        start, _, last = self._window(other)
        cut = self._cut(self._text(other, sample), rng)
        if num_documents == 1 and other < window:
            last = self._window(window)[0]
        end = min(start + cut + self._room - length, last) - start
        if end > len(sample):  # B goes on in the next window
            sample = np.concatenate([sample, self.fetch(other + 1)])
        return self._masker.vocabulary.checked(sample[cut:end])


def _another(number: int, count: int, rng: np.random.Generator) -> int:
    """One of the numbers below `count` except `number`."""
    drawn = int(rng.integers(count - 1))
    return drawn + (drawn >= number)
