"""Names under which papers and other systems know schedules, and the name of each schedule here.

A schedule has one name here, and `make_schedule` takes no other; its error tells a reader of a paper the right one.
Capitals, spaces, hyphens, underscores and a leading "Schedule", as in the classes of torch.distributed.pipelining, make
no difference.
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


def name_here(name: str, names: Iterable[str]) -> str | None:
    """Returns which of the schedules `names` another system or a paper calls `name`; None if it is not known."""
    plain = _plain(name)
    by_plain_name = {_plain(each): each for each in names}
    return by_plain_name.get(plain) or by_plain_name.get(_plain(_HERE.get(plain, "")))


def _plain(name: str) -> str:
    return re.sub(r"[ _-]", "", name).lower().removeprefix("schedule")
