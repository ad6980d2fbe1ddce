"""What a person meant by a text that is no data source (`data.source`, `data.eval_source`)."""

import difflib
import os
from collections.abc import Sequence

# The kind of source that the ending of a file's name says, for whom writes a path alone; any other file is text.
_BY_ENDING = {".tsv": "tsv", ".jsonl": "jsonl", ".array_record": "array_record", ".arrayrecord": "array_record"}


def source_meant(value: str, kinds: Sequence[str]) -> str:
    """A sentence with the source to write in place of `value`; empty where nothing is known of it.

    Args:
      value: what was written, such as a path alone.
      kinds: the kinds of sources that have a path.
    """
    kind, colon, path = value.partition(":")
    if kind in kinds and not path:
        return f"{kind} needs a path: write {kind}:{'PREFIX' if kind == 'megatron' else 'PATH'}."
    if kind == "stdlib":
        return "stdlib has no path: write stdlib."
    if colon and path and "/" not in kind:
        close = difflib.get_close_matches(kind, kinds, n=1, cutoff=0.5)
        return f"There is no kind {kind!r}. Write {close[0]}:{path}." if close else ""
    stem, ending = os.path.splitext(value)
    if ending in (".bin", ".idx"):
        other = f", or tokens:{value} for a file of nothing but tokens" if ending == ".bin" else ""
        return f"Write megatron:{stem}{other}."
    if ending in (".gz", ".zst", ".parquet", ".json"):
        return f"fiddlex prepare_data --input={value} --output_prefix=PREFIX makes a source of it, megatron:PREFIX."
    if "/" in value or ending or os.path.exists(os.path.expanduser(value)):
        return f"Write {_BY_ENDING.get(ending, 'text')}:{value}."
    return ""
