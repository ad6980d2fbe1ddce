"""Texts to tokens and back as transformers' tokenizers do it, with the special tokens at the beginning of a text.

Training adds no special tokens to a text (`fiddlex.data.tokenizers`). Models of transformers may have been trained with
a token at the beginning of each text, as Llama was; the post-processor in `tokenizer.json` adds it.
"""

from collections.abc import Sequence

import tokenizers

from fiddlex.data.named_tokens import end_ids, special_names
from fiddlex.data.tokenizers import ByteTokenizer, Tokenizer
from fiddlex.errors import ConfigError
from fiddlex.files.places import absolute
from fiddlex.terminal.readable import counted


class HarnessTokenizer:
    """A tokenizer as evaluations of lm-evaluation-harness use it.

    Args:
      spec: `data.tokenizer`, which made `tokenizer`. Where it is the path of a `tokenizer.json`, the file
        `tokenizer_config.json` in the same folder, if there is one, names the tokens that begin and end a text.
      add_bos_token: False: a text gets no special tokens of the file's post-processor; else, as in transformers, it
        gets them unless it begins with the text of `prefix`.
      prefix_token_id: the token `prefix`, before a text of which all tokens are scored; None: the token that begins a
        text, else the one that ends it.
    """

    def __init__(
        self, tokenizer: Tokenizer, spec: str, *, add_bos_token: bool | None = None, prefix_token_id: int | None = None
    ):
        self._tokenizer, self._add_bos_token = tokenizer, add_bos_token
        self._raw: tokenizers.Tokenizer | None = None
        names, ends = dict[str, str](), set[int]()
        if not isinstance(tokenizer, ByteTokenizer):
            path = absolute(spec)
            self._raw = tokenizers.Tokenizer.from_file(str(path))
            self._raw.no_truncation()
            self._raw.no_padding()
            names, ends = special_names(path), end_ids(path)
        begin, end = self._id(names.get("bos_token")), self._id(names.get("eos_token"))
        # The token that ends a text; None if the vocabulary has none.
        self.end = tokenizer.separator if end is None else end
        # The tokens at which generation ends: `end`, and those that `generation_config.json` or `config.json` name.
        # Where a file names another `eos_token` than the separator, the separator is none of them, unlike in
        # `Tokenizer.ends`: transformers goes on after it, and a task must score the text that the model `hf` makes.
        self.ends = frozenset(ends if self.end is None else {self.end, *ends})
        self.end_text = "" if self.end is None else tokenizer.decode([self.end])
        prefix = next((each for each in (prefix_token_id, begin, self.end) if each is not None), None)
        if prefix is None or not 0 <= prefix < tokenizer.vocab_size:
            raise ConfigError(
                f"prefix_token_id={prefix_token_id}: data.tokenizer={spec} has "
                f"{counted(tokenizer.vocab_size, 'token')} and {'no' if prefix is None else 'a'} token that begins or "
                "ends a text. Name the id of the token to put before a text of which all tokens are scored."
            )
        self.prefix = prefix
        self._prefix_text = tokenizer.decode([prefix])

    def encode(self, text: str, *, add_special_tokens: bool | None = None) -> list[int]:
        """The ids of `text`; `add_special_tokens` overrules the constructor's `add_bos_token`."""
        if self._raw is None:
            return self._tokenizer.encode(text).tolist()
        add = add_special_tokens
        if add is None:
            begun = bool(self._prefix_text) and text.startswith(self._prefix_text)
            add = self._add_bos_token is not False and not begun
        return list(self._raw.encode(text, add_special_tokens=add).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` without special tokens."""
        return self._tokenizer.decode(ids) if self._raw is None else self._raw.decode(list(ids))

    def _id(self, name: str | None) -> int | None:
        return None if name is None or self._raw is None else self._raw.token_to_id(name)
