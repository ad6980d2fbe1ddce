"""Watches the processes of a run, so that the loss or failure of one ends all of them within a bounded time.

Each process writes a count to the key-value store of the first process every second. The first process judges the
others by it; the others judge the first one by the answers of its store. A process that was killed shows at once, as an
error of a collective, and a process that is stopped or cut off shows only by its silence.
"""

import atexit
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

PEER_TIMEOUT_S = 60.0  # of silence, after which a process counts as lost
SUSPECTED_S = 5.0  # the same after a collective has failed
FAILED = "fiddlex/failed"  # who has failed, and the status that all end with
_ALIVE, _SUSPECTED = "fiddlex/alive", "fiddlex/suspected"
_POLL_S, _BEAT_S = 0.2, 1.0


class Peers:
    """The watch of one process over the others.

    Args:
      client: the client of jax's coordination service.
      rank: this process's rank.
      number: how many processes there are.
      lost: says a message for all processes and ends them; takes the message and the lost ranks.
      leave: ends this process with a status, without a message.

    Attributes:
      timeout_s: seconds of silence after which another process counts as lost.
    """

    def __init__(
        self,
        client: Any,
        rank: int,
        number: int,
        *,
        lost: Callable[[str, list[int]], NoReturn],
        leave: Callable[[int], NoReturn],
    ):
        self.timeout_s = PEER_TIMEOUT_S
        self._client, self._rank, self._lost, self._leave = client, rank, lost, leave
        now = time.monotonic()
        others = range(1, number) if rank == 0 else [0]
        self._heard = dict.fromkeys(others, now)  # when each other process was last heard of
        self._said = dict.fromkeys(others, "")  # its last count and host
        self._suspected = threading.Event()
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=loop, daemon=True) for loop in (self._listen, self._judge)]
        for thread in self._threads:
            thread.start()
        atexit.register(self.stop)  # before jax leaves the store, whose functions must not run then

    def stop(self) -> None:
        """Ends the watch."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(timeout=_BEAT_S)

    def suspect(self) -> None:
        """Returns if no other process is lost; called where a collective has failed."""
        self._suspected.set()
        with contextlib.suppress(Exception):
            self._client.key_value_set(_SUSPECTED, "", allow_overwrite=True)
        time.sleep(min(self.timeout_s, SUSPECTED_S) + 2 * _BEAT_S)

    def _listen(self) -> None:
        """Beats, and reads the store; an answer may never come where the first process is stopped."""
        count, beaten = 0, 0.0
        while not self._stopped.wait(_POLL_S):
            try:
                if failed := self._value(FAILED):
                    if json.loads(failed)["rank"] != self._rank:
                        self._leave(json.loads(failed)["status"])
                    return
                if time.monotonic() - beaten >= _BEAT_S:
                    count, beaten = count + 1, time.monotonic()
                    said = f"{count} {socket.gethostname()}"
                    self._client.key_value_set(f"{_ALIVE}/{self._rank}", said, allow_overwrite=True)
                    if self._value(_SUSPECTED) is not None:
                        self._suspected.set()
                    self._hear()
            except Exception:
                continue  # the first process does not answer

    def _hear(self) -> None:
        """Notes who has been heard of."""
        for key, said in self._client.key_value_dir_get(_ALIVE):
            other = int(key.rpartition("/")[2])
            if other in self._heard and (self._rank or said != self._said[other]):
                self._heard[other], self._said[other] = time.monotonic(), said

    def _judge(self) -> None:
        while not self._stopped.wait(_POLL_S):
            limit = min(self.timeout_s, SUSPECTED_S) if self._suspected.is_set() else self.timeout_s
            now = time.monotonic()
            if lost := [rank for rank, heard in self._heard.items() if now - heard > limit]:
                named = (f"{rank} ({self._said[rank].partition(' ')[2] or 'unknown host'})" for rank in lost)
                self._lost(
                    f"lost rank {', '.join(named)}, not heard of for {limit:g} s (train.peer_timeout_s). The run ends; "
                    "the same command goes on from its newest checkpoint.",
                    lost,
                )

    def _value(self, key: str) -> str | None:
        try:
            value: str = self._client.key_value_try_get(key)
        except Exception as error:
            if "NOT_FOUND" in str(error):
                return None
            raise
        return value
