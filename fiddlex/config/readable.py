"""Numbers as messages give them to people: durations and counts."""


def readable_time(seconds: float) -> str:
    """`0.4 ms`, `210 ms`, `5.2 s`, `42 s`, `3 min 05 s` or `2 h 03 min`."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600:,} h {whole % 3600 // 60:02d} min"
    if whole >= 60:
        return f"{whole // 60} min {whole % 60:02d} s"
    if round(seconds, 1) >= 10 or seconds == 0:
        return f"{whole} s"
    if round(1000 * seconds) >= 1000:
        return f"{seconds:.1f} s"
    if round(1000 * seconds, 1) >= 10:
        return f"{1000 * seconds:.0f} ms"
    return f"{1000 * seconds:.1f} ms" if round(1000 * seconds, 1) > 0 else "less than 0.1 ms"


def counted(number: int, one: str) -> str:
    """`1 step`, `3,000 steps`.

    Args:
      number: how many.
      one: what one of them is called; several have an s more.
    """
    return f"{number:,} {one}{'s' * (number != 1)}"
