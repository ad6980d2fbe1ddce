"""The model `fiddlex` of EleutherAI's lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness).

    lm = FiddlexLM(workdir="/tmp/gpt_tiny")
    results = lm_eval.simple_evaluate(model=lm, tasks=["hellaswag"])

Texts become tokens as in the harness' own model `hf`, so that both compute the same numbers for the same weights.
"""

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fiddlex.config import Config
from fiddlex.config.overrides import overridden
from fiddlex.data import ScoredEnds, Tokenizer
from fiddlex.data.corpus import corpus_tokenizer
from fiddlex.data.dataset import Dataset
from fiddlex.errors import ConfigError, DataError, installation
from fiddlex.tools.harness_tokens import HarnessTokenizer
from fiddlex.train.inference.generation_options import generation_options
from fiddlex.train.run.workdir import read_config
from fiddlex.train.trainer import load_trainer

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ConfigError(
        f"lm-evaluation-harness takes the extra `lm-eval` ({installation('lm-eval')}): {error}."
    ) from error


logger = logging.getLogger(__name__)


@register_model("fiddlex")
class FiddlexLM(TemplateLM):
    """The best or newest weights of a workdir, on the mesh of its config.

    Args:
      workdir: the directory of a run, which has a GPT or Llama and a tokenizer.
      add_bos_token: see `HarnessTokenizer`.
      prefix_token_id: see `HarnessTokenizer`.
      batch_size: sequences in a batch, `data.global_batch_size`; None or "auto": as the run's config says.
      change: maps the run's config to the config to use.
      force: whether to go on although the memory will not be enough (`fiddlex.train.run.faults.require_memory`).
      overrides: fields of the config by name, as in `{"mesh.data": 2}`, which overrule `change`.

    Raises:
      CheckpointError: when the workdir has no readable weights.
      ConfigError: when a value is out of range, the model does not predict the next token, or the tokenizer has no
        token that begins or ends a text.
      DataError: when the tokenizer cannot be read or does not fit the model.
    """

    def __init__(
        self,
        workdir: str,
        *,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        seed: int = 0,  # seed of the draws of requests that sample
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,  # unused; the harness passes it to each model
        device: str | None = None,  # unused; the config's mesh decides
        change: Callable[[Config], Config] = lambda config: config,
        force: bool = False,
        **overrides: Any,
    ):
        super().__init__()
        if batch_size not in (None, "auto"):
            if not str(batch_size).isdecimal():
                raise ConfigError(f"batch_size={batch_size} must be a number of sequences, or auto.")
            overrides["data.global_batch_size"] = int(str(batch_size))

        def changed(saved: Config) -> Config:
            return overridden(change(saved), overrides)

        config = changed(read_config(Path(workdir)))
        if config.model.task != "lm":
            raise ConfigError(
                f"workdir={workdir} has model.objective={config.model.task}; the harness' tasks take a model that "
                "predicts the next token (model.objective=lm)."
            )
        tokenizer = _tokenizer(config, workdir)
        self._text = HarnessTokenizer(
            tokenizer, config.data.tokenizer, add_bos_token=add_bos_token, prefix_token_id=prefix_token_id
        )
        self._seed, self._name = seed, config.data.tokenizer
        # The requests are the only data: one example stands in the place of training data.
        nothing = ScoredEnds([(np.zeros(2, np.int32), 1)], seq_len=config.model.seq_len)
        dataset = Dataset("lm-evaluation-harness", "", "", nothing, None, tokenizer)
        self._trainer = load_trainer(Path(workdir), changed, dataset, force=force)

    @property
    def step(self) -> int:
        return self._trainer.step

    @property
    def max_length(self) -> int:
        return self._trainer.config.model.seq_len

    @property
    def eot_token_id(self) -> int | None:
        return self._text.end

    @property
    def prefix_token_id(self) -> int:
        return self._text.prefix

    @property
    def tokenizer_name(self) -> str:
        """A name for the harness' cache of requests."""
        return self._name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self._text.encode(string, add_special_tokens=add_special_tokens)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Log-likelihoods of continuations in nats, and whether each of their tokens is the model's likeliest.

        A request is what the harness' cache calls it (or None), and the tokens of context and continuation. A context
        that is too long loses its start.
        """
        if not requests:
            return []
        for name, _context, continuation in requests:
            if not continuation:
                raise DataError(
                    f"The request {_shown(name)} has nothing to score: context and continuation together have no more "
                    "tokens than the context alone, since the continuation is empty or completes the context's last "
                    "token. Let it begin with a space (target_delimiter of the task), or leave the task out."
                )
            if len(continuation) > self.max_length:
                raise DataError(
                    f"The continuation of the request {_shown(name)} has {len(continuation)} tokens, more than "
                    f"model.seq_len={self.max_length}, and only contexts are cut. Leave the task out, or use a model "
                    "of longer sequences."
                )
        # White space alone is moved from a context to its continuation, and may leave the context without a token.
        sequences = [
            (np.array((context or [self.prefix_token_id]) + continuation, np.int32), len(continuation))
            for _name, context, continuation in requests
        ]
        scores_E3 = self._trainer.scores(ScoredEnds(sequences, seq_len=self.max_length))[:, 0]
        answers = [
            (-float(loss), round(right) == number)
            for (loss, _weight, right), (_tokens, number) in zip(scores_E3.tolist(), sequences, strict=True)
        ]
        for (name, _context, _continuation), answer in zip(requests, answers, strict=True):
            if name is not None:
                self.cache_hook.add_partial("loglikelihood", name, answer)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts in nats; each token is scored once, in the harness' own windows."""
        texts = [request.args[0] for request in requests]
        windows = [
            [
                (None, *make_disjoint_window(window))
                for window in get_rolling_token_windows(
                    token_list=self.tok_encode(text),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length,
                    context_len=1,
                )
            ]
            for text in texts
        ]
        answers = iter(self._loglikelihood_tokens([window for of_text in windows for window in of_text]))
        totals = [sum(next(answers)[0] for _window in of_text) for of_text in windows]
        for text, total in zip(texts, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts that continue contexts, up to the first stop string or the end of the text.

        A context keeps its last `model.seq_len` − `max_gen_toks` tokens, and at least one.
        """
        texts, size = [""] * len(requests), self._trainer.config.data.global_batch_size
        alike: dict[str, list[int]] = {}  # requests of the same options are drawn together
        for number, request in enumerate(requests):
            alike.setdefault(json.dumps(request.args[1], sort_keys=True, default=str), []).append(number)
        done = 0
        for numbers in alike.values():
            for batch in (numbers[start : start + size] for start in range(0, len(numbers), size)):
                made = self._continued([requests[number].args for number in batch], first_row=done)
                for number, text in zip(batch, made, strict=True):
                    texts[number] = text
                    self.cache_hook.add_partial("generate_until", requests[number].args, text)
                done += len(batch)
        return texts

    def _continued(self, requests: Sequence[tuple[str, Any]], first_row: int) -> list[str]:
        """The texts that continue the contexts of requests that all have the same options."""
        stops, length, sampling = generation_options(requests[0][1], seed=self._seed)
        stops += [self._text.end_text] if self._text.end_text else []
        last = max(1, self.max_length - length)
        prompts = [self.tok_encode(context)[-last:] or [self.prefix_token_id] for context, _options in requests]
        texts = [_Drawn(self._text, stops) for _ in prompts]
        for tokens in self._trainer.draw(prompts, length, sampling, first_row=first_row):
            for text, token in zip(texts, tokens.tolist(), strict=True):
                text.add(token)
            if all(text.ended for text in texts):
                break
        return [text.text for text in texts]


class _Drawn:
    """The tokens that are drawn for a request, up to a stop string or the end of the text."""

    def __init__(self, tokenizer: HarnessTokenizer, stops: Sequence[str]):
        self._tokenizer, self._stops, self._tokens = tokenizer, stops, list[int]()
        self.ended = False

    def add(self, token: int) -> None:
        if self.ended:
            return
        self._tokens.append(token)  # also one that ends the text: `hf` shows its text unless the token is special
        ended = any(stop in self._tokenizer.decode(self._tokens) for stop in self._stops)
        self.ended = ended or token in self._tokenizer.ends

    @property
    def text(self) -> str:
        """The text, without the stop string."""
        text = self._tokenizer.decode(self._tokens)
        for stop in self._stops:
            text = text.split(stop)[0]
        return text


def _shown(name: Any) -> str:
    """A request for a message: what the harness calls it, a pair of texts, each cut to its end."""
    return " + ".join(repr(text if len(text) <= 40 else f"…{text[-40:]}") for text in name or ())


def _tokenizer(config: Config, workdir: str) -> Tokenizer:
    vocab_size, named = config.model.vocab_size, config.data.tokenizer
    tokenizer = corpus_tokenizer(config.data, vocab_size)
    if tokenizer is None:
        raise ConfigError(
            f"workdir={workdir} was trained on {config.data.source}, whose tokenizer is not known. Set data.tokenizer "
            "to the JSON file of the tokenizer that made those tokens."
        )
    if 2 * tokenizer.vocab_size < vocab_size:
        logger.warning(
            "data.tokenizer=%s has %d tokens, and the model has %d: is it the model's tokenizer?",
            *(named, tokenizer.vocab_size, vocab_size),
        )
    return tokenizer
