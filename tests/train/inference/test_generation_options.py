import math

import pytest

from fiddlex.errors import ConfigError
from fiddlex.train.inference.generation_options import generation_options
from fiddlex.train.inference.sampling import SamplingConfig


@pytest.mark.parametrize(
    ("options", "stops", "length", "sampling"),
    [
        ({}, [], 256, SamplingConfig(temperature=0.0, seed=3)),
        ({"until": "\n", "max_gen_toks": 5}, ["\n"], 5, SamplingConfig(temperature=0.0, seed=3)),
        ({"until": ["a", "", "b"], "max_new_tokens": 7}, ["a", "b"], 7, SamplingConfig(temperature=0.0, seed=3)),
        ({"until": None, "max_tokens": 7, "max_gen_toks": 9}, [], 9, SamplingConfig(temperature=0.0, seed=3)),
        ({"temperature": 0.5, "do_sample": 0}, [], 256, SamplingConfig(temperature=0.0, seed=3)),
        ({"temperature": 0.5, "do_sample": False, "top_p": None}, [], 256, SamplingConfig(temperature=0.0, seed=3)),
        (
            {"temperature": 0.5, "do_sample": True, "top_k": 9, "top_p": 0.9},
            [],
            256,
            SamplingConfig(temperature=0.5, top_k=9, top_p=0.9, seed=3),
        ),
    ],
)
def test_options(options, stops, length, sampling):
    assert generation_options(options, seed=3) == (stops, length, sampling)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_beams": 4, "until": []},
            r"generation_kwargs num_beams=4: fiddlex knows until, max_gen_toks, .* top_p\.",
        ),
        ({"max_gen_toks": 0}, "max_gen_toks=0 must be at least 1"),
        ({"temperature": -1}, "temperature=-1.0 must be at least 0"),
        ({"temperature": "hot"}, "generation_kwargs temperature='hot' must be a number"),
        ({"max_gen_toks": math.inf}, "generation_kwargs max_gen_toks=inf must be a number"),
        ({"max_gen_toks": "many"}, "generation_kwargs max_gen_toks='many' must be a number"),
    ],
)
def test_options_that_are_unknown_or_out_of_range(options, message):
    with pytest.raises(ConfigError, match=message):
        generation_options(options, seed=0)
