"""Lists the configs that fiddlex comes with, which --config takes by name, with the arguments that they take.

    fiddlex configs [--format=json]

A config whose arguments stand in brackets can be named without one. A config of your own is a Python file, named by its
path: `--config=my/config.py`, or `--config=my/config.py:ARGUMENT`.
"""

import json

from absl import flags

from fiddlex.config.files import NamedConfig, named_configs

_FORMAT = flags.DEFINE_enum("format", "text", ["text", "json"], "json: one JSON object last on standard output")


def main(argv: list[str]) -> None:
    """Prints a line for each config, and below it the arguments."""
    configs = list(named_configs())
    if _FORMAT.value == "json":
        print(json.dumps({"configs": [config._asdict() for config in configs]}))
        return
    width = max(len(config.name) for config in configs)
    for config in configs:
        print(f"{config.name:<{width}}  {config.summary}")
        if config.parameter:
            print(f"{'':<{width}}  {_with_arguments(config)}")


def _with_arguments(config: NamedConfig) -> str:
    text = f":{'|'.join(filter(None, config.arguments)) or config.parameter.upper()}"
    return f"{config.name}[{text}]" if "" in config.arguments else f"{config.name}{text}"
