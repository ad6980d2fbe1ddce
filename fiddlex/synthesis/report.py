"""What a search found, as a sentence and as facts for JSON."""

from fiddlex.synthesis.search import Found


def told(found: Found, clock: str) -> str:
    time, bound = found.judged.time, found.bound
    above = f"{time / bound - 1:.1%} above" if time > bound * (1 + 1e-9) else "as short as"
    return (
        f"found among {found.tried:,} schedules for the {clock.replace('_', '-')} clock, from {found.origin}: "
        f"{time:g} long, {above} {bound:g}, which no schedule with such stages can beat"
    )


def facts(found: Found) -> dict[str, object]:
    placement, strict = found.schedule.placement, found.schedule.strict
    of_it = {"origin": found.origin, "tried": found.tried, "placement": placement, "strict": strict}
    return {"time": found.judged.time, "bound": found.bound, **of_it}
