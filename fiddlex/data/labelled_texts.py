"""Labelled texts: from the rows of a table to the rows of a task, split into training and held-out rows.

A row of classification has one or two texts and a class. A row of multiple choice has a context, an optional question,
and choices of which one is right. `data.text_fields`, `data.choices_fields` and `data.label_field` name their columns
or keys.

Invariant: every row that remains can be used for training: its texts are not empty and its label is one that the config
allows. Rows that share their first text are on one side of a split.
"""

import dataclasses
import hashlib
import json
import logging
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fiddlex.config import DataConfig
from fiddlex.data.bad_lines import BadLineError, checked_choices, choice_index, text_of, value_of
from fiddlex.data.tables import Table, read_table
from fiddlex.errors import ConfigError, DataError
from fiddlex.terminal.readable import shown

logger = logging.getLogger(__name__)

_LISTED_LABELS = 12  # most labels of a file that a message lists
_LONGEST_LABEL = 60  # characters; longer labels are probably not names of classes


@dataclasses.dataclass(frozen=True, slots=True)
class TaskRow:
    """A row of a task."""

    texts: tuple[str, ...]  # one or two texts, in the order of `data.text_fields`
    choices: tuple[str, ...]  # of multiple choice; empty in classification
    label: int  # index of the class, or of the right choice, from 0


def read_classification(source: str, config: DataConfig) -> Table[TaskRow]:
    """Reads a file of texts with classes.

    A label is the name of a class; white space around it is ignored. For numbers and for true and false, the name is
    their JSON text.

    Raises:
      ConfigError: when `data.text_fields` does not name one or two fields, or names that of the label.
      DataError: at a bad line, as `read_table`.
    """
    texts = _text_fields(config)
    _check_label_field(config, texts)

    def parse(values: Mapping[str, Any]) -> tuple[tuple[str, ...], str]:
        label = value_of(values, config.label_field, named_by="data.label_field")
        return _texts(values, texts), _class_name(label, config.label_field)

    fields = dict.fromkeys(texts, "data.text_fields") | {config.label_field: "data.label_field"}
    table = read_table(source, parse, fields=fields, skip_bad_lines=config.skip_bad_lines)
    classes = {name: index for index, name in enumerate(config.classes)}
    found = _found_labels(Counter(label for _, label in table.rows))

    def resolve(row: tuple[tuple[str, ...], str]) -> TaskRow:
        row_texts, label = row
        if label not in classes:
            raise BadLineError(
                "label outside data.labels",
                f"{config.label_field!r} is {shown(label)}, which is not among data.labels={config.labels}. {found}",
            )
        return TaskRow(row_texts, (), classes[label])

    return table.convert(resolve)


def read_multiple_choice(source: str, config: DataConfig) -> Table[TaskRow]:
    """Reads a file of contexts, optional questions, and choices.

    A label is the right choice's index from 0, as a number or as text, or its letter: A, B, ….

    Raises:
      ConfigError: when the fields of `config` do not name one or two texts and the choices.
      DataError: at a bad line, as `read_table`.
    """
    texts = _text_fields(config)
    choices = _choices_fields(config, is_tsv=source.startswith("tsv:"))
    _check_label_field(config, (*texts, *choices))

    def parse(values: Mapping[str, Any]) -> TaskRow:
        row_texts, row_choices = _texts(values, texts), _choices(values, choices, config.num_choices)
        label = value_of(values, config.label_field, named_by="data.label_field")
        return TaskRow(row_texts, row_choices, choice_index(label, len(row_choices), name=config.label_field))

    fields = (
        dict.fromkeys(texts, "data.text_fields")
        | dict.fromkeys(choices, "data.choices_fields")
        | {config.label_field: "data.label_field"}
    )
    return read_table(source, parse, fields=fields, skip_bad_lines=config.skip_bad_lines)


def split_table(table: Table[TaskRow], *, fraction: float) -> tuple[Table[TaskRow], Table[TaskRow]]:
    """Splits rows: one is held out when the SHA-256 of its first text, as a number from 0 to 1, is below `fraction`.

    Rows that share their first text, such as the questions about one passage, stay together. When all rows have the
    same first text, the hash covers all texts and choices. Where `fraction` is above 0, two or more distinct texts give
    at least one to each side, if need be the one whose hash is nearest to that side. The log reports a held-out share
    of the rows that is less than half or more than twice `fraction`.

    Both tables, to train on and held out, keep the order of the rows; only `table` itself reports the skipped lines.

    Raises:
      DataError: when all rows have the same texts, so that there is nothing to split.
    """
    everything = range(len(table))
    if not fraction:
        return table.select(everything), table.select([])
    keys = [row.texts[0] for row in table.rows]
    if len(set(keys)) == 1:
        keys = ["\0".join((*row.texts, *row.choices)) for row in table.rows]
    hashes = [int.from_bytes(hashlib.sha256(key.encode("utf-8")).digest()) / 2**256 for key in keys]
    if len(set(hashes)) == 1:
        raise DataError(
            f"{table.source}: all {len(table):,} lines have the same texts, of which data.eval_fraction={fraction} "
            "cannot hold out a part. Set data.eval_source, or data.eval_fraction=0."
        )
    # Rows with the lowest hash are held out and rows with the highest are not, whatever the fraction.
    heldout = {value for value in hashes if value < fraction} | {min(hashes)}
    heldout.discard(max(hashes))
    chosen = [i for i in everything if hashes[i] in heldout]
    share = len(chosen) / len(table)
    if not fraction / 2 <= share <= 2 * fraction:
        logger.warning(
            "%s: %s of %s lines are held out (%.1f%%) with data.eval_fraction=%s: lines that share their first text "
            "are not parted, and there are %s to choose from. For a split of your own set data.eval_source.",
            *(table.source, f"{len(chosen):,}", f"{len(table):,}", 100 * share, fraction, f"{len(set(hashes)):,}"),
        )
    return table.select([i for i in everything if hashes[i] not in heldout]), table.select(chosen)


def _text_fields(config: DataConfig) -> tuple[str, ...]:
    names = _names(config.text_fields)
    if len(names) > 2 or "" in names or len(set(names)) < len(names):
        raise ConfigError(
            f"data.text_fields={config.text_fields!r} must name one column or key, or two with a comma between them, "
            "as in data.text_fields=premise,hypothesis."
        )
    return names


def _check_label_field(config: DataConfig, read: Sequence[str]) -> None:
    """Raises ConfigError when the field of the label is among the fields that the model reads."""
    if config.label_field in read:
        raise ConfigError(
            f"data.label_field={config.label_field!r} is also a field of what the model reads ({', '.join(read)}): it "
            "would read the answer. Name the column or key of the label alone."
        )


def _choices_fields(config: DataConfig, *, is_tsv: bool) -> tuple[str, ...]:
    names = _names(config.choices_fields)
    a_list = len(names) == 1 and not is_tsv  # a TSV cell cannot hold a list
    if "" in names or len(set(names)) < len(names) or not (a_list or len(names) == config.num_choices):
        one = "" if is_tsv else ", or one key that holds a list"
        raise ConfigError(
            f"data.choices_fields={config.choices_fields!r} names {len(names)}; with "
            f"data.num_choices={config.num_choices} it must name {config.num_choices} "
            f"{'columns' if is_tsv else 'keys'}, each once and with commas between them{one}. Set data.choices_fields, "
            "or data.num_choices to the number of choices that every line has."
        )
    return names


def _names(fields: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in fields.split(","))


def _texts(values: Mapping[str, Any], names: Sequence[str]) -> tuple[str, ...]:
    return tuple(text_of(values, name, named_by="data.text_fields") for name in names)


def _choices(values: Mapping[str, Any], names: Sequence[str], num_choices: int) -> tuple[str, ...]:
    if len(names) > 1:
        return tuple(text_of(values, name, named_by="data.choices_fields") for name in names)
    choices = checked_choices(value_of(values, names[0], named_by="data.choices_fields"), names[0])
    if len(choices) != num_choices:
        raise BadLineError(
            "wrong number of choices",
            f"{names[0]!r} has {len(choices)} choices, and data.num_choices={num_choices}; all lines have as many. "
            f"Where all have {len(choices)}, set data.num_choices={len(choices)}.",
        )
    return choices


def _class_name(value: Any, name: str) -> str:
    if isinstance(value, bool | int):
        return json.dumps(value)
    if not isinstance(value, str):
        raise BadLineError("wrong type", f"{name!r} is {shown(value)}, and must be the name of a class, a string.")
    return value.strip()


def _found_labels(found: Counter[str]) -> str:
    """Says which labels a file has, for a config without labels or with other ones."""
    counts = ", ".join(f"{shown(name)} ({count:,})" for name, count in found.most_common(_LISTED_LABELS))
    if len(found) > _LISTED_LABELS or max(map(len, found)) > _LONGEST_LABEL:
        return f"The file has {len(found):,} labels, such as {counts}. Is data.label_field right?"
    if any("," in name for name in found):
        return f"The file's labels are {counts}. data.labels parts names by commas: write them without in the file."
    flag = shlex.quote(f"--config.data.labels={','.join(sorted(found))}")
    return f"The file's labels are {counts}. To have them all: {flag}."
