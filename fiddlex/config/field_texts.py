"""What each field of a config means: the comment beside or above the field in its dataclass, the only copy of it."""

import ast
import inspect
import io
import textwrap
import tokenize
from collections.abc import Mapping


def field_texts(section: type) -> Mapping[str, str]:
    """The comment of each field of a section of the config, by the field's name; none for a field without a comment.

    Args:
      section: a dataclass with each field on a line of its own, as in `data: int = 1  # replicas of the model`, or
        below the comment.
    """
    source = textwrap.dedent(inspect.getsource(section))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {
        token.start[0] + token.line.lstrip().startswith("#"): token.string.lstrip("# ")  # that of the next line, alone
        for token in tokens
        if token.type == tokenize.COMMENT
    }
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    fields = [node for node in definition.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
    return {
        node.target.id: comments[node.lineno]
        for node in fields
        if isinstance(node.target, ast.Name) and node.lineno in comments
    }
