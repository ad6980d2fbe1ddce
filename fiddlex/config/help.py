"""What `--help` of the binaries shows: the program's docstring, its flags, and every field of its config."""

import dataclasses
import sys
import textwrap

from absl import flags

from fiddlex.config import Config

_WIDTH = 120
_NAME_WIDTH = 14  # of the column of names, unless one is longer


def help_text(module: str) -> str:
    """The help of a program, whose flags must already be defined.

    Args:
      module: the name of the imported module that holds the program's docstring and flags.
    """
    # absl names the flags of a program that was started by its path after the path.
    own_flags = flags.FLAGS.get_key_flags_for_module(sys.argv[0] if module == "__main__" else module)
    lines = [(sys.modules[module].__doc__ or "").strip()]
    if own_flags:
        width = max(_NAME_WIDTH, *(len(f"--{flag.name}") for flag in own_flags))
        lines += ["\nFlags:", *(_line(f"--{flag.name}", _describe(flag), width) for flag in own_flags)]
    if "config" in flags.FLAGS:
        title = "Fields of the config with their defaults; --config.section.field=value sets one"
        lines += [f"\n{title}", "(see sections.py, data_section.py and train_section.py in fiddlex/config):"]
        for name, fields in dataclasses.asdict(flags.FLAGS["config"].default or Config()).items():
            lines.append(_line(name, ", ".join(f"{field}={value!r}" for field, value in fields.items())))
    return "\n".join(lines)


def is_required(flag: flags.Flag) -> bool:
    """Whether the program refuses to start without the flag."""
    return any("other than None" in validator.message for validator in flag.validators)  # mark_flag_as_required's


def takes_file(flag: flags.Flag) -> bool:
    """Whether the flag `config` takes a file; in other programs only overrides of its fields."""
    return not flag.help.startswith("only as")


def _describe(flag: flags.Flag) -> str:
    text = " ".join(flag.help.split())  # absl inserts line breaks into some texts
    if is_required(flag):
        return f"required: {text}"
    if flag.name == "config" or flag.default in (None, []):
        return text
    default = ", ".join(map(str, flag.default)) if isinstance(flag.default, list) else repr(flag.default)
    return f"{text} (default {default})"


def _line(name: str, text: str, width: int = _NAME_WIDTH) -> str:
    return textwrap.fill(f"{name:<{width}} {text}", _WIDTH, initial_indent="  ", subsequent_indent=" " * (width + 3))
