"""Samples text from the best or newest good checkpoint of a workdir.

    fiddlex generate --workdir=/tmp/gpt_tiny --prompt='def ' [--temperature=0.8 --top_k=40 --top_p=0.95]

Overrides such as --config.mesh.data=1 are applied to the workdir's own config.
"""

import json
import pathlib

from absl import flags

from fiddlex.config.command_line import apply_overrides, define_overrides, define_workdir
from fiddlex.errors import ConfigError

define_overrides()
_WORKDIR = define_workdir("directory of a training run")
_PROMPT = flags.DEFINE_string("prompt", "", "text to continue; empty: the start of a document")
_NUM_TOKENS = flags.DEFINE_integer("num_tokens", 200, "tokens to draw", lower_bound=1)
_TEMPERATURE = flags.DEFINE_float("temperature", 1.0, "divides the logits; 0: always the likeliest token")
_TOP_K = flags.DEFINE_integer("top_k", 0, "draw from the k likeliest tokens; 0: from all")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "draw from the likeliest tokens that have this probability together")
_SEED = flags.DEFINE_integer("seed", 0, "seed of the draws")
_FORMAT = flags.DEFINE_enum("format", "text", ["text", "json"], "json: one JSON object last on standard output")


def main(argv: list[str]) -> None:
    """Prints the prompt and its continuation, piece by piece as it is drawn."""
    from fiddlex.train.inference.sampling import SamplingConfig
    from fiddlex.train.trainer import load_trainer

    sampling = SamplingConfig(_TEMPERATURE.value, _TOP_K.value, _TOP_P.value, _SEED.value)
    sampling.validate()
    if any("\ud800" <= character <= "\udfff" for character in _PROMPT.value):
        raise ConfigError("--prompt is not valid UTF-8.")
    trainer = load_trainer(pathlib.Path(_WORKDIR.value), apply_overrides)
    pieces = trainer.generate(_PROMPT.value, _NUM_TOKENS.value, sampling)
    if _FORMAT.value == "json":
        print(json.dumps({"step": trainer.step, "prompt": _PROMPT.value, "text": "".join(pieces)}))
        return
    print(_PROMPT.value, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
