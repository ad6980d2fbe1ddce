import pytest
from hypothesis import given
from hypothesis import strategies as st

from fiddlex.config.readable import counted, readable_time


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (1.23e-5, "less than 0.1 ms"),
        (4.9e-5, "less than 0.1 ms"),
        (1e-4, "0.1 ms"),
        (0.00994, "9.9 ms"),
        (0.00996, "10 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (185, "3 min 05 s"),
        (3599.6, "1 h 00 min"),
        (7383, "2 h 03 min"),
        (1.8e7, "5,000 h 00 min"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert readable_time(seconds) == text


UNITS_S = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}


@given(st.floats(1e-4, 1e9))
def test_a_duration_is_right_to_five_percent(seconds: float) -> None:
    words = readable_time(seconds).replace(",", "").split()
    told_s = sum(float(number) * UNITS_S[unit] for number, unit in zip(words[::2], words[1::2], strict=True))
    assert told_s == pytest.approx(seconds, rel=0.05 if seconds > 1e-3 else 0.5)


@pytest.mark.parametrize(("number", "text"), [(0, "0 steps"), (1, "1 step"), (2, "2 steps"), (3000, "3,000 steps")])
def test_counts(number: int, text: str) -> None:
    assert counted(number, "step") == text
