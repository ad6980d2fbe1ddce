"""What `--help` of the commands shows: the docstring, the flags, and every field of the config with its meaning."""

import ast
import dataclasses
import inspect
import io
import sys
import textwrap
import tokenize
from collections.abc import Mapping
from typing import Any

from absl import flags

from fiddlex.config import Config

_WIDTH = 120
_NAME_WIDTH = 14  # of the column of names, unless one is longer
_FIELD_WIDTH = 36  # of the column of fields with their defaults, at most; a longer one moves its text


def help_text(module: str) -> str:
    """The help of a program whose flags are defined; the imported `module` has its docstring and defines them."""
    lines = [(sys.modules[module].__doc__ or "").strip()]
    if names := own_flags(module):
        width = max(_NAME_WIDTH, *(len(f"--{name}") for name in names))
        lines += ["\nFlags:", *(_line(f"--{name}", _describe(flags.FLAGS[name]), width) for name in names)]
    if "config" in flags.FLAGS and hasattr(flags.FLAGS["config"], "override_values"):  # not a file's name alone
        lines.append("\nFields of the config with their defaults; --config.section.field=value sets one:")
        config = flags.FLAGS["config"].default or Config()
        for section in dataclasses.fields(config):
            lines += ["", *_section(section.name, getattr(config, section.name))]
    return "\n".join(lines)


def _section(name: str, section: Any) -> list[str]:
    summary = (type(section).__doc__ or "").partition("\n")[0]
    texts = field_comments(inspect.getsource(type(section)))
    fields = {f"{name}.{field}={value!r}": texts.get(field, "") for field, value in vars(section).items()}
    width = min(max(map(len, fields)), _FIELD_WIDTH)
    return [f"{name}: {summary}", *(_line(field, text, width) for field, text in fields.items())]


def own_flags(module: str) -> list[str]:
    """The names of the flags that a program defines, without those of libraries."""
    # absl names the flags of a program that was started by its path after the path.
    found = flags.FLAGS.get_key_flags_for_module(sys.argv[0] if module == "__main__" else module)
    return [flag.name for flag in found]


def is_required(flag: flags.Flag) -> bool:
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


def field_comments(source: str) -> Mapping[str, str]:
    """What each field of a class means, by its name: the comment beside or above the field; empty where there is none.

    Args:
      source: the class, each field on a line of its own, as in `data: int = 1  # replicas of the model`, or below the
        comment.
    """
    source = textwrap.dedent(source)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {
        token.start[0] + token.line.lstrip().startswith("#"): token.string.lstrip("# ")  # that of the next line, alone
        for token in tokens
        if token.type == tokenize.COMMENT
    }
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    return {
        node.target.id: comments.get(node.lineno, "")
        for node in definition.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
