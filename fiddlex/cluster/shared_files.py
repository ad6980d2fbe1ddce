"""Whether all processes of a run see the same files, as they do in a folder that their hosts share."""

import socket
import time
from collections.abc import Callable

from fiddlex.cluster import processes

SEEN_WITHIN_S = 20.0  # network file systems may show a new file late
_POLL_S = 0.1


def not_seen_by(name: str, is_seen: Callable[[], bool]) -> str:
    """The processes that do not see a file which the first has written, as in 'rank 1 (host1)'; empty if all see it.

    Waits until all have looked. `is_seen` says whether this process sees the file as it was written; it is asked again
    for `SEEN_WITHIN_S` seconds, and an OSError counts as no.
    """
    deadline = time.monotonic() + SEEN_WITHIN_S
    while not (seen := _asked(is_seen)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    answers = processes.gather(name, [seen, socket.gethostname()])
    return " and ".join(f"rank {rank} ({host})" for rank, (saw, host) in enumerate(answers) if not saw)


def _asked(is_seen: Callable[[], bool]) -> bool:
    try:
        return is_seen()
    except OSError:
        return False
