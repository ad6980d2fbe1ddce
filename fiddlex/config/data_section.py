"""The section `data` of a config: where examples come from, in which order, and how they are prepared."""

import dataclasses
import difflib
import os

from fiddlex.config import rules
from fiddlex.config.fields import NOT_EXAMPLES, NOT_SAMPLES, RUN, SHAPES, field
from fiddlex.config.records import Checked
from fiddlex.config.unused import Other
from fiddlex.config.values.source import KINDS, forms, is_megatron, parse_source, parse_split
from fiddlex.errors import ConfigError

MOST_CACHE_GIB = 2.0**20
MOST_THREADS = 256
# Which values of other fields use a field (`fiddlex.config.unused`).
HELD_OUT = {"data.eval_source": ("",)}
DIVIDED = {"data.source": forms(name for name, kind in KINDS.items() if not kind.split)}
MEGATRON = {"data.source": forms(name for name, kind in KINDS.items() if kind.split)}
_SOURCES = ("data.source", "data.eval_source")
COLUMNS = dict.fromkeys(_SOURCES, forms(name for name, kind in KINDS.items() if kind.columns))
TOKENS = dict.fromkeys(_SOURCES, ("tokens:PATH",))
TEXT = dict.fromkeys(_SOURCES, forms(name for name, kind in KINDS.items() if not kind.tokens and not kind.labelled))
MASKED = {"model.objective": ("mlm", "mlm_nsp", "mlm_sop")}
UNLABELLED = {"model.objective": ("lm", *MASKED["model.objective"])}
MLM = {"model.objective": ("mlm",)}
LABELLED = {"model.objective": ("classification", "multiple_choice")}
CLASSES = {"model.objective": ("classification",)}
CHOICES = {"model.objective": ("multiple_choice",)}
LINES = {**LABELLED, "data.eval_source": ("jsonl:PATH",)}
CACHED = {"data.sample_cache_gib": (Other(4),)}
# The kind of source that the ending of a file's name says, for whom writes a path alone; any other file is text.
_BY_ENDING = {ending: name for name, kind in KINDS.items() for ending in kind.endings}


@dataclasses.dataclass
class DataConfig(Checked, prefix="config.data."):
    """Where examples come from and how many make a batch."""

    # stdlib, or text:, hf:, array_record:, tokens:, megatron: and a path; labels: tsv:, jsonl:
    source: str = field("stdlib", RUN)
    # like source; empty: a held-out share of source; for lm also jsonl:PATH of continuations
    eval_source: str = field("", RUN | NOT_EXAMPLES)
    # held-out share of source; not with eval_source or megatron:
    eval_fraction: float = field(0.05, RUN, HELD_OUT, DIVIDED)
    # of megatron:PREFIX: shares to train on, hold out and leave out
    split: str = field("969,30,1", RUN, HELD_OUT, MEGATRON)
    # column of hf:PATH that holds the text; key in array_record:PATH's JSON
    text_column: str = field("text", RUN, COLUMNS)
    tokenizer: str = field("bytes", RUN)  # bytes | path of a JSON file of the `tokenizers` library
    token_dtype: str = field("uint16", RUN, TOKENS)  # type in files of tokens:PATH; uint16 | uint32
    # folder that keeps the tokens of text, shared by all hosts; empty: several processes, the workdir
    cache: str = field("", NOT_EXAMPLES, UNLABELLED, TEXT)
    # GiB of fetched samples to keep, which are never evicted; 0: none are kept
    sample_cache_gib: float = field(0.0, NOT_EXAMPLES)
    # folder of these, for all runs of a machine; empty: in memory
    sample_cache_folder: str = field("", NOT_EXAMPLES, CACHED)
    # folder, best in /dev/shm, by which runs of a machine prepare each batch once for all; empty: none
    share: str = field("", NOT_EXAMPLES)
    num_threads: int = field(2, NOT_EXAMPLES)  # threads of each process that prepare batches
    log_samples: bool = field(False, NOT_SAMPLES)  # writes which samples each step trains on to WORKDIR/samples
    global_batch_size: int = field(32, RUN | NOT_SAMPLES)  # examples per step, over all replicas and microbatches
    eval_batches: int = field(0, NOT_EXAMPLES)  # batches per evaluation; 0: all held-out data
    seed: int = field(0, RUN)  # seed of the order of examples and of the masks
    # share of an example's tokens to predict; for mlm, mlm_nsp and mlm_sop
    mask_fraction: float = field(0.15, RUN | NOT_SAMPLES, MASKED)
    whole_words: bool = field(False, RUN | NOT_SAMPLES, MASKED)  # masks either all tokens of a word or none
    pack: bool = field(True, RUN, MLM)  # mlm: packs short documents, each attending only to itself; else pads each
    text_fields: str = field("sentence1,sentence2", RUN, LABELLED)  # columns or keys of the one or two texts of a task
    # multiple_choice: a key with a list, or a column for each choice
    choices_fields: str = field("choices", RUN, CHOICES)
    num_choices: int = field(4, RUN, CHOICES)  # answers to choose from, for multiple_choice
    label_field: str = field("label", RUN, LABELLED)  # column or key of the right answer
    # classification: the classes in order, as in entailment,neutral,contradiction
    labels: str = field("", SHAPES, CLASSES, value="classes")
    # cuts a task's texts that are longer than model.seq_len; else an error
    truncate: bool = field(False, RUN, LABELLED)
    skip_bad_lines: bool = field(False, RUN, LINES)  # skips and counts bad lines of a task; else they are an error
    # for lm: tokens from one evaluation window to the next; 0: model.seq_len, no overlap
    eval_stride: int = field(0, NOT_EXAMPLES)

    @property
    def classes(self) -> tuple[str, ...]:
        """The labels of classification, in order."""
        return tuple(label.strip() for label in self.labels.split(",")) if self.labels else ()

    @property
    def trained_share(self) -> float:
        """The share of `source` that a run trains on."""
        if self.eval_source:
            return 1.0
        return parse_split("data.split", self.split)[0] if is_megatron(self.source) else 1 - self.eval_fraction

    def validate(self) -> None:
        for name in ("source", "eval_source"):
            _source(f"data.{name}", getattr(self, name), optional=name == "eval_source")
        rules.fraction("data.mask_fraction", self.mask_fraction)
        rules.positive("data.mask_fraction", self.mask_fraction)
        rules.at_least("data.num_choices", self.num_choices, 2)
        rules.at_least("data.eval_stride", self.eval_stride, 0)
        rules.choice("data.token_dtype", self.token_dtype, ("uint16", "uint32"))
        rules.at_least("data.global_batch_size", self.global_batch_size, 1)
        rules.at_least("data.eval_batches", self.eval_batches, 0)
        rules.at_least("data.seed", self.seed, 0)
        rules.between("data.sample_cache_gib", self.sample_cache_gib, 0, MOST_CACHE_GIB)
        rules.between("data.num_threads", self.num_threads, 1, MOST_THREADS)
        rules.fraction("data.eval_fraction", self.eval_fraction)
        parse_split("data.split", self.split)


def _source(name: str, value: str, *, optional: bool) -> None:
    kind, _, path = value.partition(":")
    known = kind in KINDS and bool(path) == bool(KINDS[kind].place)
    if not known and not (optional and not value):
        written = f"Use {_either(labelled=False)}; for labelled texts {_either(labelled=True)}."
        raise ConfigError(f"{name}={value!r} is not a data source. {_source_meant(value) or written}")
    if is_megatron(value) and len(parse_source(name, value)) > 1 and optional:
        raise ConfigError(f"{name}={value!r} is a blend: evaluate on one dataset at a time, megatron:PREFIX.")


def _either(*, labelled: bool) -> str:
    *first, last = forms(name for name, kind in KINDS.items() if kind.labelled == labelled)
    return f"{', '.join(first)} or {last}"


def _source_meant(value: str) -> str:
    """A sentence with the source to write in place of `value`, such as a path alone; empty where nothing is known."""
    kind, colon, path = value.partition(":")
    kinds = [name for name, each in KINDS.items() if each.place]
    if kind in kinds and not path:
        return f"{kind} needs a path: write {forms([kind])[0]}."
    if kind in KINDS and kind not in kinds:
        return f"{kind} has no path: write {kind}."
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
