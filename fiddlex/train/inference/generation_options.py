"""The `generation_kwargs` of lm-evaluation-harness' tasks as fiddlex's sampling."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fiddlex.errors import ConfigError
from fiddlex.train.inference.sampling import SamplingConfig

T = TypeVar("T", int, float)
_DEFAULT_LENGTH = 256  # tokens that a request generates at most, if it does not say; the harness' own default
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # the first that is set counts
_SAMPLING = ("do_sample", "temperature", "top_k", "top_p")


def generation_options(options: Mapping[str, Any], *, seed: int) -> tuple[list[str], int, SamplingConfig]:
    """The stop strings, the most tokens, and the sampling that a request's options ask for.

    Without `temperature`, and with `do_sample: false`, the likeliest token is always taken, as in the harness' `hf`.
    """
    known = ("until", *_LENGTHS, *_SAMPLING)
    if unknown := [name for name in options if name not in known]:
        raise ConfigError(
            f"generation_kwargs {', '.join(f'{name}={options[name]!r}' for name in unknown)}: fiddlex knows "
            f"{', '.join(known)}. Change the task's generation_kwargs."
        )
    until = options.get("until") or []
    stops = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
    length = next((_number(options, name, int) for name in _LENGTHS if options.get(name) is not None), _DEFAULT_LENGTH)
    if length < 1:
        raise ConfigError(f"max_gen_toks={length} must be at least 1.")
    given = {name: options[name] for name in _SAMPLING if options.get(name) is not None}
    greedy = given.get("do_sample", True) == 0  # or False
    sampling = SamplingConfig(
        temperature=0.0 if greedy else _number(given, "temperature", float, 0.0),
        top_k=_number(given, "top_k", int, 0),
        top_p=_number(given, "top_p", float, 1.0),
        seed=seed,
    )
    sampling.validate()
    return stops, length, sampling


def _number(options: Mapping[str, Any], name: str, kind: Callable[[Any], T], default: T | None = None) -> T:
    value = options.get(name, default)
    try:
        return kind(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"generation_kwargs {name}={value!r} must be a number.") from error
