"""Generation with a model that follows a script: which tokens it is asked about, and what becomes text."""

import pathlib
from collections.abc import Iterable, Sequence

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from hypothesis import strategies as st

from fiddlex.data import ByteTokenizer, JsonTokenizer
from fiddlex.errors import ConfigError, NonFiniteError
from fiddlex.train.inference.generation import Completion, Piece, Speed, TextGenerator, collect, generate
from fiddlex.train.inference.sampling import SamplingConfig

GREEDY = SamplingConfig(temperature=0.0)


class Scripted:
    """Takes the place of `Decoding`: the next tokens are given, and every call is noted.

    Args:
      script: for each step, the next token of each row.
      seq_len: the window.
      rows: the number of rows is a multiple of it.
    """

    def __init__(self, script: Iterable[Sequence[int]], *, seq_len: int = 64, rows: int = 1):
        self.seq_len, self._rows, self.calls = seq_len, rows, list[tuple[str, object]]()
        self._script = iter(script)

    def num_rows(self, num_texts: int) -> int:
        return -(-num_texts // self._rows) * self._rows

    def weights(self, master: object) -> object:
        return master

    def prefill(self, weights: object, texts: list[list[int]], num_new: int) -> tuple[object, jax.Array]:
        assert len(texts) == self.num_rows(len(texts))
        self.calls.append(("prefill", [list(text) for text in texts]))
        return "state", self._logits(len(texts))

    def step(self, weights: object, state: object, tokens: jax.Array) -> tuple[object, jax.Array]:
        self.calls.append(("step", tokens.tolist()))
        return state, self._logits(len(tokens))

    def _logits(self, rows: int) -> jax.Array:
        tokens = [*next(self._script), *[7] * rows][:rows]
        return jax.nn.one_hot(jnp.asarray(tokens), 300)


def tokens_of(decoding: Scripted, prompts: list[list[int]], number: int, **options: bool) -> list[list[int]]:
    drawn = generate(decoding, {}, prompts, number, vocab_size=300, config=GREEDY, **options)
    return [tokens.tolist() for tokens in drawn]


def test_the_window_slides() -> None:
    decoding = Scripted(([n] for n in range(1, 9)), seq_len=4)
    assert tokens_of(decoding, [[14, 15]], 5) == [[1], [2], [3], [4], [5]]
    assert decoding.calls == [
        ("prefill", [[14, 15]]),
        ("step", [1]),
        ("step", [2]),
        ("prefill", [[15, 1, 2, 3]]),
        ("prefill", [[1, 2, 3, 4]]),
    ]


def test_texts_of_several_lengths_slide_when_the_longest_does() -> None:
    decoding = Scripted([[1, 11], [2, 12], [3, 13]], seq_len=3, rows=2)
    assert tokens_of(decoding, [[20], [30, 31]], 3) == [[1, 11], [2, 12], [3, 13]]
    assert decoding.calls == [
        ("prefill", [[20], [30, 31]]),
        ("step", [1, 11]),
        ("prefill", [[20, 1, 2], [31, 11, 12]]),
    ]


def test_rows_that_fill_the_mesh_are_not_returned() -> None:
    decoding = Scripted([[1], [2]], rows=4)
    assert tokens_of(decoding, [[20, 21]], 2) == [[1], [2]]
    assert decoding.calls == [("prefill", [[20, 21], [20], [20], [20]]), ("step", [1, 7, 7, 7])]


def test_without_the_cache_every_token_reads_its_whole_text() -> None:
    decoding = Scripted([[1], [2], [3]])
    assert tokens_of(decoding, [[20]], 3, cached=False) == [[1], [2], [3]]
    assert decoding.calls == [("prefill", [[20]]), ("prefill", [[20, 1]]), ("prefill", [[20, 1, 2]])]


def test_logits_that_are_not_finite_are_told() -> None:
    decoding = Scripted([[1], [2]])
    decoding._logits = lambda rows: jnp.full((rows, 300), jnp.nan)  # type: ignore[method-assign]
    with pytest.raises(NonFiniteError, match="logits of the next token are not finite"):
        tokens_of(decoding, [[20]], 2)


def generator_of(*texts: bytes, **options: int) -> TextGenerator:
    """A generator of bytes that goes on with `texts`."""
    length = max(map(len, texts))
    return TextGenerator(
        Scripted(zip(*(text.ljust(length) for text in texts), strict=True), **options), {}, ByteTokenizer()
    )


def test_text_comes_in_whole_characters_and_ends_with_the_document() -> None:
    pieces = list(generator_of("aé€".encode() + b"\xff!\0never").stream([""], 50, GREEDY))
    assert [piece.text for (piece,) in pieces if piece.text] == ["a", "é", "€", "\ufffd!"]
    assert [piece.end for (piece,) in pieces] == [""] * (len(pieces) - 1) + ["document"]


def test_an_incomplete_character_at_the_end_is_shown() -> None:
    generator = generator_of("a€".encode())
    assert generator.complete(["x"], 3, GREEDY) == [Completion("x", "a\ufffd", "length", 3)]


def test_a_text_that_has_ended_waits_for_the_others() -> None:
    generator = generator_of(b"ab\0never", b"cdefghij", b"c;efghij")
    stream = list(generator.stream(["x", "", "y"], 6, GREEDY, stop=[";e"]))
    assert stream[2] == [Piece("", "document"), Piece("e"), Piece("", "stop")]
    assert stream[3] == [Piece("", "document"), Piece("f"), Piece("", "stop")]
    assert collect(["x", "", "y"], iter(stream)) == [
        Completion("x", "ab", "document", 3),
        Completion("", "cdefgh", "length", 6),
        Completion("y", "c", "stop", 3),
    ]


def test_speed_counts_the_tokens_of_texts_that_go_on() -> None:
    speed = Speed(generator_of(b"ab\0never", b"cdefghij").stream(["x", "y"], 5, GREEDY))
    assert len(list(speed)) == 5
    assert (speed.num_tokens, speed.num_tokens - 2) == (8, round((speed.tokens_per_second or 0) * speed.rest_s))


@hypothesis.given(
    text=st.text(st.sampled_from("ab\n"), min_size=1, max_size=30),
    stops=st.lists(st.text(st.sampled_from("ab\n"), min_size=1, max_size=4), max_size=3),
)
def test_a_text_ends_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    (done,) = generator_of(text.encode()).complete(["x"], len(text), GREEDY, stop=stops)
    places = [text.index(stop) for stop in stops if stop in text]
    # A stop string that is complete earlier ends the text, even where a longer one begins before it.
    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        assert done == Completion("x", text, "length", len(text))
        return
    drawn = text[: min(ends)]
    expected = min(drawn.index(stop) for stop in stops if stop in drawn)
    assert min(places) <= expected
    assert done == Completion("x", text[:expected], "stop", min(ends))


def test_what_may_begin_a_stop_string_is_shown_once_it_does_not() -> None:
    pieces = list(generator_of(b"a;;b;").stream(["x"], 5, GREEDY, stop=[";;;"]))
    assert [piece.text for (piece,) in pieces] == ["a", "", "", ";;b", ";"]


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        (
            ["ok", "x" * 9],
            {},
            r"^Prompt 2 has 9 tokens, and the model sees at most model\.seq_len=8: the first 1 would",
        ),
        (["ok"], {"stop": [""]}, "stop string is empty"),
        (["ok"], {"stop": ["\0"]}, ""),
        ([], {}, "0 prompts: each must be at least 1"),
    ],
)
def test_what_cannot_be_generated_is_told_at_once(prompts: list[str], options: dict, message: str) -> None:
    generator = generator_of(b"abc", seq_len=8)
    if not message:
        generator.stream(prompts, 3, GREEDY, **options)
        return
    with pytest.raises(ConfigError, match=message):
        generator.stream(prompts, 3, GREEDY, **options)


def test_a_stop_string_that_the_tokenizer_cannot_make(tmp_path: pathlib.Path) -> None:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"fold": 0, "bind": 1}, unk_token="fold"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    tokenizer.save(str(tmp_path / "tokenizer.json"))  # puts a space before each word but the first of a text
    generator = TextGenerator(Scripted([[1], [1]]), {}, JsonTokenizer(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"^The stop string 'Bind' becomes 'bind' .* no text would ever contain it"):
        generator.stream(["fold"], 2, GREEDY, stop=["Bind"])
    assert [piece.text for (piece,) in generator.stream(["fold"], 2, GREEDY)] == [" bind", " bind"]
    assert np.all(generator.check(["fold bind"], 1, GREEDY, ["bind"]) == [[0, 1]])


def test_a_prompt_begins_as_the_tokenizer_file_says(tmp_path: pathlib.Path) -> None:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "</s>": 1, "a": 2}, unk_token="a"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    made = JsonTokenizer(tmp_path / "tokenizer.json")
    for add, expected in ((True, [[0, 2, 2], [0, 2], [0]]), (False, [[2, 2], [0, 2], []])):
        generator = TextGenerator(Scripted([]), {}, made, add_beginning=add)
        assert generator.check(["a a", "<s> a", ""], 1, GREEDY, []) == expected


def test_a_text_ends_at_each_token_that_the_files_name(tmp_path: pathlib.Path) -> None:
    words = {"</s>": 0, "a": 1, "<|im_end|>": 2, "<|eot_id|>": 3}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))
    made.add_special_tokens([word for word in words if word != "a"])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 2]}')
    tokenizer = JsonTokenizer(tmp_path / "tokenizer.json")
    for end in (0, 2, 3):
        (done,) = TextGenerator(Scripted([[1], [end], [1]]), {}, tokenizer).complete(["a"], 3, GREEDY)
        assert (done.end, done.num_tokens) == ("document", 2)


def test_a_tokenizer_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"set data\.tokenizer to the JSON file"):
        TextGenerator(Scripted([]), {}, None)
