"""Generation: texts that a model continues, many at once, token by token.

The tokens come from `Decoding`, which keeps keys and values of earlier tokens. Each token is drawn given the last
`seq_len` tokens before it. Once a text is longer than that, what the model computed for earlier tokens no longer holds,
since it saw tokens that have left the window: from then on every token takes a pass over the whole window.
"""

import functools
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from fiddlex.data import PieceDecoder, Tokenizer
from fiddlex.data.tokenizers import begun
from fiddlex.errors import ConfigError, NonFiniteError
from fiddlex.models.weights import Weights
from fiddlex.parallel.sharding import on_host
from fiddlex.terminal.readable import counted
from fiddlex.train.inference.decoding import Decoding
from fiddlex.train.inference.sampling import SamplingConfig, sample

STOP, DOCUMENT, LENGTH = "stop", "document", "length"


class Piece(NamedTuple):
    """What one more token adds to a text."""

    text: str  # whole characters; empty where they wait for more tokens, and after the end
    end: str = ""  # as in `Completion`; empty while the text goes on


class Completion(NamedTuple):
    """A text that was continued."""

    prompt: str
    text: str  # the continuation, without the prompt
    end: str  # "stop": at a stop string; "document": at the end of the document; "length": when all tokens were drawn
    num_tokens: int  # that were drawn


def generate(
    decoding: Decoding,
    weights: Weights,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    *,
    vocab_size: int,
    config: SamplingConfig,
    first_row: int = 0,
    cached: bool = True,
) -> Iterator[np.ndarray]:
    """Yields the next token of each text, int32 [texts], `num_tokens` times.

    Each of `prompts` has 1 to `decoding.seq_len` tokens, and `weights` are `decoding.weights`. Only tokens below
    `vocab_size` are drawn. For `first_row` and `cached`, see `TextGenerator.stream`.

    Raises:
      NonFiniteError: when the logits are not finite.
    """
    draw = functools.partial(sample, config=config, vocab_size=vocab_size, first_row=first_row)
    texts = [list(prompt) for prompt in prompts]
    texts += [texts[0][:1]] * (decoding.num_rows(len(texts)) - len(texts))  # rows that no one reads
    longest, drawn, state = max(map(len, prompts)), None, None

    def read(tokens_B: jax.Array) -> np.ndarray:
        found = on_host(tokens_B)[: len(prompts)]
        if found.min() < 0:
            raise NonFiniteError("The logits of the next token are not finite: the weights are not, or have exploded.")
        for text, token in zip(texts, found.tolist(), strict=False):
            text.append(token)
        return found

    for number in range(num_tokens):
        if cached and state is not None and longest + number <= decoding.seq_len:
            assert drawn is not None
            state, logits_BV = decoding.step(weights, state, drawn)
            following = draw(logits_BV, number)
            yield read(drawn)  # while the devices compute the next token
        else:
            if drawn is not None:
                yield read(drawn)
            windows = [text[-decoding.seq_len :] for text in texts]
            num_new = min(num_tokens - 1, decoding.seq_len - longest) if cached and drawn is None else 0
            state, logits_BV = decoding.prefill(weights, windows, num_new)
            following = draw(logits_BV, number)
        drawn = following
    if drawn is not None:
        yield read(drawn)


class TextGenerator:
    """Continues texts with the weights of a model.

    Args:
      decoding: the compiled passes of the model.
      weights: the master weights.
      tokenizer: the tokenizer of the texts that the model was trained on; None where the config does not tell it.
      add_beginning: whether prompts begin with the tokens that the tokenizer's file puts before a text (Llama), as they
        do in transformers.

    Raises:
      ConfigError: when there is no tokenizer.
    """

    def __init__(
        self, decoding: Decoding, weights: Weights, tokenizer: Tokenizer | None, *, add_beginning: bool = True
    ):
        if tokenizer is None:
            raise ConfigError(
                "The tokenizer of this model is not known, so that no text can become tokens: set data.tokenizer to "
                "the JSON file that the tokens of its training data were made with."
            )
        self._decoding, self._weights, self._tokenizer = decoding, weights, tokenizer
        self._beginning = tokenizer.beginning if add_beginning else []

    def stream(
        self,
        prompts: Sequence[str],
        num_tokens: int,
        sampling: SamplingConfig | None = None,
        *,
        stop: Sequence[str] = (),
        first_row: int = 0,
        cached: bool = True,
    ) -> Iterator[list[Piece]]:
        """Yields, token by token, what is added to each text; ends when all texts have ended.

        Args:
          prompts: the texts to continue, at least one; an empty one starts a document.
          num_tokens: the most tokens to draw for each text.
          sampling: how to draw; None: the defaults of `SamplingConfig`.
          stop: strings at which a text ends, and which are not a part of it.
          first_row: number of the first text; count on from batch to batch, so that no two texts share draws.
          cached: whether to keep keys and values; without them, every token takes a pass over its text, as a
            comparison.

        Raises:
          ConfigError: at once, at a value out of range, a prompt longer than the window, or a stop string that the
            tokenizer cannot make.
        """
        sampling = sampling or SamplingConfig()
        starts = self.check(prompts, num_tokens, sampling, stop)
        drawn = generate(
            self._decoding,
            self._compute_weights,
            [start or [self._tokenizer.separator or 0] for start in starts],
            num_tokens,
            vocab_size=self._tokenizer.vocab_size,
            config=sampling,
            first_row=first_row,
            cached=cached,
        )
        return _pieces([_Text(self._tokenizer, start, stop) for start in starts], drawn, num_tokens)

    @functools.cached_property
    def _compute_weights(self) -> Weights:
        return self._decoding.weights(self._weights)

    def complete(
        self,
        prompts: Sequence[str],
        num_tokens: int,
        sampling: SamplingConfig | None = None,
        *,
        stop: Sequence[str] = (),
        cached: bool = True,
    ) -> list[Completion]:
        """Returns the whole continuation of each prompt; the arguments and errors are those of `stream`."""
        return collect(prompts, self.stream(prompts, num_tokens, sampling, stop=stop, cached=cached))

    def check(
        self, prompts: Sequence[str], num_tokens: int, sampling: SamplingConfig, stop: Sequence[str]
    ) -> list[list[int]]:
        """Raises ConfigError where `stream` would; returns the tokens of the prompts."""
        sampling.validate()
        if num_tokens < 1 or not prompts:
            raise ConfigError(
                f"num_tokens={num_tokens} and {counted(len(prompts), 'prompt')}: each must be at least 1."
            )
        _check_stops(stop, self._tokenizer)
        tokens = [self._tokenizer.encode(prompt).tolist() for prompt in prompts]
        tokens = [begun(each, self._beginning) for each in tokens]
        seq_len = self._decoding.seq_len
        for number, prompt in enumerate(tokens, start=1):
            if len(prompt) > seq_len:
                raise ConfigError(
                    f"Prompt {number} has {counted(len(prompt), 'token')}, and the model sees at most "
                    f"model.seq_len={seq_len:,}: the first {len(prompt) - seq_len:,} would have no effect. Shorten the "
                    "prompt; a model with rotary positions and no sliding window may take a larger model.seq_len."
                )
        return tokens


def collect(prompts: Sequence[str], stream: Iterator[list[Piece]]) -> list[Completion]:
    """The completions whose pieces `TextGenerator.stream` yields for `prompts`."""
    texts, ends, counts = [""] * len(prompts), [""] * len(prompts), [0] * len(prompts)
    for pieces in stream:
        for i, piece in enumerate(pieces):
            counts[i] += not ends[i]
            texts[i], ends[i] = texts[i] + piece.text, piece.end
    return [Completion(*each) for each in zip(prompts, texts, ends, counts, strict=True)]


class Speed:
    """Counts tokens and time while it passes on what `TextGenerator.stream` yields."""

    def __init__(self, stream: Iterator[list[Piece]]):
        self._stream = stream
        self.num_tokens = self.num_rest = 0  # drawn, over all texts; of them, those after the first of each text
        # Until the first token of each text, with reading the prompts and compiling; and for all further tokens.
        self.first_s = self.rest_s = 0.0

    def __iter__(self) -> Iterator[list[Piece]]:
        started, ended = time.monotonic(), 0
        for pieces in self._stream:
            now, drawing = time.monotonic(), len(pieces) - ended
            if not self.num_tokens:
                self.first_s, started = now - started, now
            else:
                self.rest_s, self.num_rest = now - started, self.num_rest + drawing
            self.num_tokens += drawing
            ended = sum(bool(piece.end) for piece in pieces)
            yield pieces

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second after the first of each text; None where there is only one."""
        return self.num_rest / self.rest_s if self.num_rest and self.rest_s else None


def _pieces(texts: "list[_Text]", drawn: Iterator[np.ndarray], num_tokens: int) -> Iterator[list[Piece]]:
    for number, tokens in enumerate(drawn, start=1):
        pieces = [text.push(token, last=number == num_tokens) for text, token in zip(texts, tokens, strict=True)]
        yield pieces
        if all(piece.end for piece in pieces):
            return


class _Text:
    """One text as it grows: decodes its tokens, and ends it at a stop string or at a token that ends a document."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str]):
        self._decoder, self._ends, self._stop = PieceDecoder(tokenizer, prompt), tokenizer.ends, stop
        self._held, self._end = "", ""  # text that may be the beginning of a stop string

    def push(self, token: int, *, last: bool) -> Piece:
        """What a token adds; `last` says that no other will follow."""
        if self._end:
            return Piece("", self._end)
        if int(token) in self._ends:
            self._end, added = DOCUMENT, self._decoder.flush()
        else:
            self._end, added = LENGTH if last else "", self._decoder.push(int(token))
            added += self._decoder.flush() if last else ""
        text = self._held + added
        found = [place for each in self._stop if (place := text.find(each)) >= 0]
        if found:
            self._end, self._held = STOP, ""
            return Piece(text[: min(found)], STOP)
        held = 0 if self._end else max((_overlap(text, each) for each in self._stop), default=0)
        shown, self._held = text[: len(text) - held], text[len(text) - held :]
        return Piece(shown, self._end)


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` with which `stop` begins."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def _check_stops(stops: Sequence[str], tokenizer: Tokenizer) -> None:
    for stop in stops:
        if not stop:
            raise ConfigError("A stop string is empty: every text contains it. Leave it out.")
        made = (tokenizer.decode(tokenizer.encode(text)) for text in (stop, f"a{stop}"))
        if not any(stop in text for text in made):
            raise ConfigError(
                f"The stop string {stop!r} becomes {tokenizer.decode(tokenizer.encode(stop))!r} when the tokenizer "
                "encodes and decodes it, so that no text would ever contain it. Name a string that the tokenizer keeps."
            )
