"""How many samples a run has fetched, found in its cache, prepared itself and taken from other runs."""

import collections
import threading

FETCHED, HITS = "data_fetched", "data_cache_hits"
PREPARED, TAKEN = "data_prepared", "data_taken"


class DataCounts:
    """Counts of samples since the start of the process; all threads add to them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: collections.Counter[str] = collections.Counter()
        self._taken: collections.Counter[str] = collections.Counter()

    def add(self, name: str, number: int = 1) -> None:
        """Adds to a count; 0 makes the count known, so that it is told from then on."""
        with self._lock:
            self._totals[name] += number

    def totals(self) -> dict[str, int]:
        with self._lock:
            return dict(self._totals)

    def take(self) -> dict[str, int]:
        """All counts since the last call, for a record."""
        totals = self.totals()
        since = {name: total - self._taken[name] for name, total in totals.items()}
        self._taken.update(since)
        return since

    def describe(self) -> str:
        """A sentence for the log; empty when nothing is counted."""
        totals, parts = collections.Counter(self.totals()), []
        if (asked := totals[FETCHED] + totals[HITS]) and HITS in totals:
            share = totals[HITS] / asked
            parts.append(f"{totals[HITS]:,} of {asked:,} samples ({share:.1%}) came from the cache")
        if (made := totals[PREPARED] + totals[TAKEN]) and TAKEN in totals:
            parts.append(f"other runs had prepared {totals[TAKEN]:,} of {made:,} examples")
        return "; ".join(parts)
