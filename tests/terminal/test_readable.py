import pytest
from hypothesis import given
from hypothesis import strategies as st

from fiddlex.terminal.readable import counted, gib, mib, readable_size, readable_time


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (4.9e-8, "less than 1 µs"),
        (1.23e-6, "1.2 µs"),
        (4.9e-5, "49 µs"),
        (0.00094, "940 µs"),
        (0.00096, "960 µs"),
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
        (25.05, "25 s"),  # 0.00696 hours
        (172799, "47 h 59 min"),
        (172800, "2 days 00 h"),
        (1.8e8, "2,083 days 08 h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert readable_time(seconds) == text


UNITS_S = {"µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "days": 86400.0}


@given(st.floats(1e-6, 1e9))
def test_a_duration_is_right_to_five_percent(seconds: float) -> None:
    words = readable_time(seconds).replace(",", "").split()
    told_s = sum(float(number) * UNITS_S[unit] for number, unit in zip(words[::2], words[1::2], strict=True))
    assert told_s == pytest.approx(seconds, rel=0.05)


@pytest.mark.parametrize(("number", "text"), [(0, "0 steps"), (1, "1 step"), (2, "2 steps"), (3000, "3,000 steps")])
def test_counts(number: int, text: str) -> None:
    assert counted(number, "step") == text
    several = text.replace("steps", "microbatches").replace("step", "microbatch")
    assert counted(number, "microbatch", "microbatches") == several


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1023, "1023 bytes"),
        (1024, "1.00 KiB"),
        (6900, "6.74 KiB"),
        (9.7e6, "9.25 MiB"),
        (95.6e6, "91.17 MiB"),
        (1023.7, "1.00 KiB"),
        (2**30 - 2**20, "1,023.0 MiB"),
        (2**30 - 1, "1.00 GiB"),
        (480 * 2**30, "480.0 GiB"),
        (3 * 2**40, "3.00 TiB"),
        (2**52, "4,096.0 TiB"),
    ],
)
def test_sizes(num_bytes: float, text: str) -> None:
    assert readable_size(num_bytes) == text


UNITS = {"byte": 1, "bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@given(st.integers(0, 2**60))
def test_a_size_is_right_to_half_a_percent(num_bytes: int) -> None:
    number, unit = readable_size(num_bytes).replace(",", "").split()
    assert float(number) * UNITS[unit] == pytest.approx(num_bytes, rel=0.006)


def test_sizes_in_the_unit_of_a_table() -> None:
    assert [gib(size) for size in (2**36, 1.25 * 2**30, 2**29, 12345678)] == ["64.0", "1.2", "0.5", "0.011"]
    assert [mib(size) for size in (2**36, 2**20, 12345)] == ["65,536.0", "1.0", "0.0"]
