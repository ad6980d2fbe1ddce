"""Names under which papers and other systems know schedules, and the name of each schedule here.

`make_schedule` takes only the names here; its error tells a reader of a paper the right one. Capitals, spaces, hyphens,
underscores and a leading "Schedule", as in the classes of torch.distributed.pipelining, make no difference.
"""

import re
from collections.abc import Iterable

_HERE = {
    "bfs": "breadth_first",
    "dapple": "1f1b",  # Fan et al., PPoPP 2021
    "depthfirst": "interleaved_1f1b",  # Lamy-Poirier, MLSys 2023, section 4
    "fthenb": "gpipe",  # PaddlePaddle
    "interleaved": "interleaved_1f1b",
    "interleavedgpipe": "breadth_first",
    "loopedbfs": "breadth_first",  # torch
    "loopeddfs": "interleaved_1f1b",
    "loopedgpipe": "breadth_first",
    "pipedreamflush": "1f1b",  # Narayanan et al., ICML 2021
    "virtualpipeline": "interleaved_1f1b",  # Megatron-LM, as is the next
    "vpp": "interleaved_1f1b",
    "zbvzerobubble": "zb_v",  # torch
}
_INTERLEAVED_ZERO_BUBBLE = (  # torch; of one stage on each rank, its order is that of ZB-H1
    "with one stage on each rank it is called zb_h1 here, and with more it runs from a table, file:PATH.csv."
)


def told_name(name: str, names: Iterable[str]) -> str | None:
    """What a schedule that others call `name` is called here, as in "it is called zb_v here."; None: unknown."""
    plain = _plain(name)
    if plain == "interleavedzerobubble":
        return _INTERLEAVED_ZERO_BUBBLE
    by_plain_name = {_plain(each): each for each in names}
    here = by_plain_name.get(plain) or by_plain_name.get(_plain(_HERE.get(plain, "")))
    return f"it is called {here} here." if here else None


def _plain(name: str) -> str:
    return re.sub(r"[ _-]", "", name).lower().removeprefix("schedule")
