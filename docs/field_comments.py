"""Shows the comments beside the fields of classes in the reference: an extension of griffe, which reads the docstrings.

Dataclasses and NamedTuples explain each field by a comment in its line, or in the line above. Here they become the part
`Attributes` of the class's docstring, as if they had been written there.
"""

from typing import Any

from griffe import Class, Docstring, Extension

from fiddlex.terminal.help import field_comments


class FieldComments(Extension):
    """Adds the fields of each class that explains some by comments to its docstring."""

    def on_class_members(self, *, cls: Class, **kwargs: Any) -> None:
        """Called by griffe when it has read a class and its members."""
        fields = field_comments(cls.source)
        if cls.docstring and any(fields.values()):
            texts = {name: text.replace("][", r"]\[") for name, text in fields.items()}  # no link of Markdown
            lines = [f"  {name}: {text or '—'}" for name, text in texts.items()]
            cls.docstring = Docstring("\n".join([cls.docstring.value, "", "Attributes:", *lines]), parent=cls)
