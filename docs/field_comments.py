"""Shows the comments beside a config's fields in the reference: an extension of griffe, which reads the docstrings.

The fields of `fiddlex.config` are explained where they are defined, each by a comment at the end of its line. Here they
become the section `Attributes` of the class's docstring, as if they had been written there.
"""

import io
import tokenize
from typing import Any

from griffe import Class, Docstring, Extension

_PACKAGE = "fiddlex.config."


class FieldComments(Extension):
    """Adds the fields of each class of `fiddlex.config` to its docstring."""

    def on_class_members(self, *, cls: Class, **kwargs: Any) -> None:
        """Called by griffe when it has read a class and its members."""
        if cls.path.startswith(_PACKAGE) and cls.docstring and "Attributes:" not in cls.docstring.value:
            comments = _comments(cls)
            lines = [f"  {name}: {comment or '—'}" for name, comment in comments.items()]
            if any(comments.values()):
                cls.docstring = Docstring("\n".join([cls.docstring.value, "", "Attributes:", *lines]), parent=cls)


def _comments(cls: Class) -> dict[str, str]:
    """The comment at the end of each field's line, empty where there is none."""
    source = "\n".join(cls.lines) + "\n"
    of_line = {
        token.start[0] + (cls.lineno or 1) - 1: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    return {
        name: of_line.get(field.endlineno or 0, "")
        for name, field in cls.attributes.items()
        if field.annotation and "property" not in field.labels and not name.startswith("_")
    }
