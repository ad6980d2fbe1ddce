"""Counts the code of fiddlex: lines, docstrings, large files and classes, and places that name a mesh axis.

    .venv/bin/python experiments/code_size.py [--root=fiddlex]

Prints the table of docs/studies/code_size.md. Code lines are lines with a token other than a comment or a docstring. A
place that names an axis is a string `data`, `pipe` or `tensor`, an argument or keyword of that name, or an attribute of
that name of a mesh, a layout or `self`.
"""

import ast
import collections
import io
import pathlib
import tokenize
from collections.abc import Iterator
from typing import NamedTuple

from absl import app, flags

from fiddlex.config.sections import AXES

_ROOT = flags.DEFINE_string("root", "fiddlex", "folder whose Python files are counted")
_MOST_LINES, _MOST_METHODS = 400, 15
_OF_MESHES = ("mesh", "layout", "self")  # names whose attributes `data`, `pipe`, `tensor` are numbers of devices
_NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


class File(NamedTuple):
    """What is counted in one file."""

    path: pathlib.Path
    lines: int
    code: int
    docstrings: int
    axes: int
    large_classes: int


def count(path: pathlib.Path) -> File:
    """Counts one file."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    documented = set(_docstring_lines(tree))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    with_code = {
        line
        for token in tokens
        if token.type not in _NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
        if line not in documented
    }
    classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    large = sum(sum(isinstance(each, ast.FunctionDef) for each in node.body) > _MOST_METHODS for node in classes)
    return File(path, text.count("\n"), len(with_code), len(documented), sum(map(_names_axis, ast.walk(tree))), large)


def _docstring_lines(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            text = node.body[0]
            yield from range(text.lineno, (text.end_lineno or text.lineno) + 1)


def _names_axis(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return node.value in AXES if isinstance(node.value, str) else False
    if isinstance(node, ast.Attribute):
        owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
        return node.attr in AXES and owner in _OF_MESHES
    return isinstance(node, ast.arg | ast.keyword) and node.arg in AXES


def main(argv: list[str]) -> None:
    """Prints the table."""
    root = pathlib.Path(_ROOT.value)
    files = [count(path) for path in sorted(root.rglob("*.py"))]
    code, documented = (sum(getattr(each, name) for each in files) for name in ("code", "docstrings"))
    folders = collections.Counter(each.path.parent for each in files)
    with_axes = [each for each in files if each.axes]
    rows = {
        "code lines (no docstrings, comments, blank lines)": f"{code:,}",
        "docstring lines per code line": f"{documented / code:.2f}",
        "places that name an axis": f"{sum(each.axes for each in files)} in {len(with_axes)} files",
        f"files above {_MOST_LINES} lines": f"{sum(each.lines > _MOST_LINES for each in files)}",
        f"classes above {_MOST_METHODS} methods": f"{sum(each.large_classes for each in files)}",
        **{f"files of {folder}": f"{number}" for folder, number in folders.most_common(5)},
    }
    print("| | |\n|---|---:|")
    print("\n".join(f"| {name} | {value} |" for name, value in rows.items()))


if __name__ == "__main__":
    app.run(main)
