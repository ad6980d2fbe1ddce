"""Shows the comments beside a config's fields in the reference: an extension of griffe, which reads the docstrings.

The sections of `fiddlex.config` explain each field by a comment in its line. Here they become the part `Attributes` of
the class's docstring, as if they had been written there.
"""

import dataclasses
from typing import Any

from griffe import Class, Docstring, Extension

import fiddlex.config
from fiddlex.terminal.help import field_texts


class FieldComments(Extension):
    """Adds the fields of each section of the config to its docstring."""

    def on_class_members(self, *, cls: Class, **kwargs: Any) -> None:
        """Called by griffe when it has read a class and its members."""
        section = getattr(fiddlex.config, cls.name, None)
        if cls.path.startswith("fiddlex.config.") and section and cls.docstring and (texts := field_texts(section)):
            lines = [f"  {field.name}: {texts.get(field.name, '—')}" for field in dataclasses.fields(section)]
            cls.docstring = Docstring("\n".join([cls.docstring.value, "", "Attributes:", *lines]), parent=cls)
