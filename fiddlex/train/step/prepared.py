"""The batches of the coming steps, which the host prepares while the devices run a step."""

import time
from collections.abc import Iterator

from fiddlex.errors import DataError
from fiddlex.train.step.dispatched import InFlight
from fiddlex.train.step.feed import DeviceBatch, Feed
from fiddlex.train.step.stopwatch import Activity, Stopwatch


class Prepared:
    """Batches on the devices, in the order of the steps; measures how long the host waits for them."""

    def __init__(self, feed: Feed, in_flight: InFlight, stopwatch: Stopwatch):
        self.batches: list[DeviceBatch] = []  # those that are ready; the first is the next step's
        self._feed, self._in_flight, self._stopwatch = feed, in_flight, stopwatch
        self._source: Iterator[DeviceBatch] | None = None
        self._started = False  # whether there was a batch: before the first one, the loader starts its threads

    def prepare(self, number: int, *, step: int) -> None:
        """Prepares batches until `number` of them are ready, the first of which is batch number `step` (from 0)."""
        while len(self.batches) < number:
            if self._source is None:
                self._source = self._feed.train(step + len(self.batches))
            start_s = time.monotonic()
            try:
                with self._stopwatch.measure(Activity.DATA if self._started else Activity.STARTING):
                    self.batches.append(next(self._source))
            except DataError:
                self._source = None
                raise
            if self._started:
                idle_s = self._in_flight.idle_s(time.monotonic() - start_s)
                self._stopwatch.move(idle_s, Activity.DATA, Activity.STARVED)
            self._started = True

    def clear(self) -> None:
        """Drops the batches; the next ones may be of any step."""
        self.batches, self._source = [], None
