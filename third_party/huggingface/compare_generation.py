"""Compares greedy generation with that of transformers: the same tokens, and how many per second.

    python -m third_party.huggingface.compare_generation [--rounds=5 --num_tokens=64 --prompt_length=64]

Both programs continue the same random prompts with the same random weights in float32, on the CPU, with all cores. The
four ways to do it take turns, so that other load on the machine affects all of them; times are medians over the rounds,
from the prompt to the last token, without compiling.
"""

import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable

import jax
import numpy as np
import torch
import transformers
from absl import app, flags

from fiddlex.cluster.mesh import make_mesh
from fiddlex.config import Config
from fiddlex.config.overrides import replaced
from fiddlex.interop.folder import read_settings
from fiddlex.train.inference.decoding import make_decoding
from fiddlex.train.inference.generation import generate
from fiddlex.train.inference.sampling import SamplingConfig
from fiddlex.train.run.transfer.importing import converted
from fiddlex.train.step.program import Program

_ROUNDS = flags.DEFINE_integer("rounds", 5, "turns of each way", lower_bound=1)
_NUM_TOKENS = flags.DEFINE_integer("num_tokens", 64, "tokens to draw for each prompt", lower_bound=1)
_PROMPT_LENGTH = flags.DEFINE_integer("prompt_length", 64, "tokens of a prompt", lower_bound=1)
_BATCHES = flags.DEFINE_list("batches", ["1", "8"], "numbers of prompts")

Tokens = np.ndarray  # int [prompt, token]


def models() -> dict[str, transformers.PreTrainedModel]:
    """Random models: GPT-2 as published, and a Llama of about its size in which four heads share keys and values."""
    llama = transformers.LlamaConfig(
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=3,
        vocab_size=32000,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    return {
        "GPT-2, 124M": transformers.GPT2LMHeadModel(transformers.GPT2Config()),
        "Llama, 98M": transformers.LlamaForCausalLM(llama),
    }


def ours(folder: pathlib.Path) -> Callable[[Tokens, bool], Tokens]:
    """Greedy generation by fiddlex with the weights of a folder, on one device."""
    config = replaced(Config(), read_settings(folder)).validate()
    program = Program(config, make_mesh(config.mesh))
    decoding = make_decoding(program)
    weights = decoding.weights(converted(folder, program))

    def run(prompts: Tokens, cached: bool) -> Tokens:
        drawn = generate(
            decoding,
            weights,
            prompts.tolist(),
            _NUM_TOKENS.value,
            vocab_size=config.model.vocab_size,
            config=SamplingConfig(temperature=0),
            cached=cached,
        )
        return np.stack(list(drawn), axis=1)

    return run


def theirs(model: transformers.PreTrainedModel) -> Callable[[Tokens, bool], Tokens]:
    """Greedy generation by transformers."""
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    @torch.no_grad()
    def run(prompts: Tokens, cached: bool) -> Tokens:
        inputs = torch.tensor(prompts)
        mask = torch.ones_like(inputs)
        made = model.eval().generate(
            inputs, attention_mask=mask, max_new_tokens=_NUM_TOKENS.value, do_sample=False, use_cache=cached
        )
        found: Tokens = made.numpy()[:, prompts.shape[1] :]
        return found

    return run


def main(argv: list[str]) -> None:
    """Prints a table of tokens per second, over all prompts."""
    torch.manual_seed(0)
    ways = {
        "fiddlex": (0, True),
        "fiddlex, no cache": (0, False),
        "transformers": (1, True),
        "transformers, no cache": (1, False),
    }
    print(f"| model, prompts | {' | '.join(ways)} |\n|---|{'---:|' * len(ways)}")
    for name, model in models().items():
        with torch.no_grad():  # larger than at the start of training, so that no two logits are nearly equal
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            programs = ours(pathlib.Path(folder)), theirs(model)
        for batch in map(int, _BATCHES.value):
            rng = np.random.default_rng(batch)
            prompts = rng.integers(0, model.config.vocab_size, (batch, _PROMPT_LENGTH.value))
            first = {way: programs[program](prompts, cached) for way, (program, cached) in ways.items()}
            for way, tokens in first.items():
                if not np.array_equal(tokens, first["transformers"]):
                    raise AssertionError(f"{name}, {batch} prompts: {way} draws other tokens than transformers.")
            seconds: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(_ROUNDS.value):
                for way, (program, cached) in ways.items():
                    start = time.monotonic()
                    programs[program](prompts, cached)
                    seconds[way].append(time.monotonic() - start)
            rates = [batch * _NUM_TOKENS.value / statistics.median(seconds[way]) for way in ways]
            print(f"| {name}, {batch} | {' | '.join(f'{rate:.1f}' for rate in rates)} |", flush=True)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    app.run(main)
