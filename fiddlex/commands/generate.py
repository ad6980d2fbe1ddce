"""Continues texts with the best or newest good checkpoint of a workdir.

    fiddlex generate --workdir=/tmp/gpt_tiny --prompt='def ' [--temperature=0.8 --top_k=40 --top_p=0.95]
    fiddlex generate --workdir=/tmp/gpt_tiny --prompt='def ' --prompt='class ' --num_samples=4 --stop='def '
    fiddlex generate --workdir=/tmp/gpt_tiny --prompt_file=/tmp/prompts.jsonl --format=json

A single text is printed as it is drawn, several when they are complete. Overrides such as --config.mesh.data=1 are
applied to the workdir's own config.
"""

import itertools
import json
import logging
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from absl import flags

from fiddlex.cluster.process_flags import define_processes
from fiddlex.errors import ConfigError
from fiddlex.terminal.command_line import apply_overrides, define_overrides, define_path, define_workdir
from fiddlex.terminal.progress import phase
from fiddlex.terminal.readable import counted, readable_time

if TYPE_CHECKING:
    from fiddlex.train.inference.generation import Completion, Speed, TextGenerator
    from fiddlex.train.inference.sampling import SamplingConfig

STRAY_ARGUMENT = "prompt"

define_overrides()
_WORKDIR = define_workdir("directory of a training run")
_PROMPT = flags.DEFINE_multi_string(
    "prompt", [], "text to continue; may be given several times; empty or left out: the start of a document"
)
_PROMPT_FILE = define_path("prompt_file", "", "JSON Lines: each line a string, or an object with `prompt`")
_NUM_SAMPLES = flags.DEFINE_integer("num_samples", 1, "texts to draw for each prompt", lower_bound=1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 32, "texts that are drawn together", lower_bound=1)
_NUM_TOKENS = flags.DEFINE_integer("num_tokens", 200, "tokens to draw for each text at most", lower_bound=1)
_STOP = flags.DEFINE_multi_string("stop", [], "string that ends a text; may be given several times; \\n: a new line")
_TEMPERATURE = flags.DEFINE_float("temperature", 1.0, "divides the logits; 0: always the likeliest token")
_TOP_K = flags.DEFINE_integer("top_k", 0, "draw from the k likeliest tokens; 0: from all")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "draw from the likeliest tokens that have this probability together")
_ADD_BOS = flags.DEFINE_bool(
    "add_bos",
    True,
    "begins a prompt with the token that tokenizer.json puts before a text, if it does, as transformers",
)
_SEED = flags.DEFINE_integer("seed", 0, "seed of the draws")
_FORMAT = flags.DEFINE_enum("format", "text", ["text", "json"], "json: one JSON object last on standard output")

logger = logging.getLogger("fiddlex.generate")
_join = define_processes()


def main(argv: list[str]) -> None:
    """Prints each prompt and its continuation."""
    _join()
    with phase("Importing jax"):
        from fiddlex.train.inference.sampling import SamplingConfig
        from fiddlex.train.run.transfer.result import load_generator

    sampling = SamplingConfig(_TEMPERATURE.value, _TOP_K.value, _TOP_P.value, _SEED.value)
    sampling.validate()
    given = _prompts()
    _check_utf8("prompt", given)
    _check_utf8("stop", _STOP.value)
    stop = [each.replace("\\n", "\n") for each in _STOP.value]
    generator, step = load_generator(pathlib.Path(_WORKDIR.value), apply_overrides, add_beginning=_ADD_BOS.value)
    generator.check(given, _NUM_TOKENS.value, sampling, stop)
    prompts = [prompt for prompt in given for _ in range(_NUM_SAMPLES.value)]
    done: list[Completion] = []
    speeds: list[Speed] = []
    for batch, speed in _batches(generator, prompts, sampling, stop):
        done += _drawn(batch, speed, single=len(prompts) == 1)
        speeds.append(speed)
        rate = f", then {speed.tokens_per_second:,.0f} tokens/s" if speed.tokens_per_second else ""
        logger.info(
            "%d of %s: first token after %s%s.",
            len(done),
            counted(len(prompts), "text"),
            readable_time(speed.first_s),
            rate,
        )
    if _FORMAT.value == "json":
        samples = [completion._asdict() for completion in done]
        record = {"step": step, "samples": samples, "first_token_s": speeds[0].first_s}
        seconds = sum(speed.rest_s for speed in speeds)
        record["tokens_per_second"] = sum(speed.num_rest for speed in speeds) / seconds if seconds else None
        if len(samples) == 1:
            record |= {name: samples[0][name] for name in ("prompt", "text")}
        print(json.dumps(record))


def _batches(
    generator: "TextGenerator", prompts: list[str], sampling: "SamplingConfig", stop: list[str]
) -> Iterator[tuple[list[str], "Speed"]]:
    """Batches of prompts, with the pieces that continue them."""
    from fiddlex.train.inference.generation import Speed

    for start in range(0, len(prompts), _BATCH_SIZE.value):
        batch = prompts[start : start + _BATCH_SIZE.value]
        yield batch, Speed(generator.stream(batch, _NUM_TOKENS.value, sampling, stop=stop, first_row=start))


def _drawn(prompts: list[str], speed: "Speed", *, single: bool) -> list["Completion"]:
    """Draws the texts of a batch, and prints them unless the output is JSON."""
    from fiddlex.train.inference.generation import collect

    shows = _FORMAT.value == "text"
    if not (shows and single):
        done = collect(prompts, _counted(speed))
        for completion in done if shows else ():
            print(
                f"--- {counted(completion.num_tokens, 'token')}, end: "
                f"{completion.end}\n{completion.prompt}{completion.text}"
            )
        return done

    def shown() -> Iterator[list]:
        drawn = iter(speed)
        with phase("Compiling, and reading the prompt"):  # until then there is nothing to print
            first = next(drawn)
        print(prompts[0], end="", flush=True)
        for pieces in itertools.chain([first], drawn):
            print(pieces[0].text, end="", flush=True)
            yield pieces
        print()

    return collect(prompts, shown())


def _counted(speed: "Speed") -> Iterator[list]:
    """What `speed` yields, while the number of tokens drawn for each text is shown."""
    with phase("Sampling", total=_NUM_TOKENS.value, unit="tokens") as sampling:
        for number, pieces in enumerate(speed, start=1):
            sampling.advance(number)
            yield pieces


def _prompts() -> list[str]:
    """The prompts of both flags; raises ConfigError for a bad one."""
    from fiddlex.data.prompts import read_prompts

    prompts = list(_PROMPT.value)
    if _PROMPT_FILE.value:
        prompts += read_prompts(pathlib.Path(_PROMPT_FILE.value))
    return prompts or [""]


def _check_utf8(flag: str, texts: list[str]) -> None:
    from fiddlex.data.prompts import is_unicode

    for text in texts:
        if not is_unicode(text):
            raise ConfigError(f"--{flag}={text!a} is not valid UTF-8.")
