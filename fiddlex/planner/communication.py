"""How long collectives take on the links of a topology.

Each is taken to run as a ring, whose links are all busy all the time. It moves the fewest bytes that there can be
(Patarasu and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, JPDC 2009), and is what NCCL
and XLA do with large buffers; for small ones NCCL has trees, of fewer steps. On n devices a reduce-scatter is n − 1
steps, in each of which every device sends an n-th of the buffer to the next; an all-gather is the same backwards.

A group that spans several links (`Topology.rings`) works from the innermost outwards, as in Cho et al., BlueConnect
(MLSys 2019): a ring of n devices leaves an n-th of the buffer to each, and of the next rings, of which n then run side
by side, each moves only that. With V bytes, and n_k devices at W_k bytes/s and L_k seconds a step on ring k:

    T = Σ_k [ (n_k − 1)/n_k · V / (n_1 ⋯ n_(k−1)) / W_k + (n_k − 1) · L_k ]

Invariant: nothing overlaps here. What runs beside computation is for the caller to say.
"""

from collections.abc import Iterable

from fiddlex.cluster.topology import Link, Ring


def all_gather_s(num_bytes: float, rings: Iterable[Ring]) -> float:
    """Seconds of an all-gather: T of the module's docstring.

    Args:
      num_bytes: of the whole buffer, as every device has it afterwards.
      rings: of the group, the innermost first; none: one device, which takes no time.
    """
    seconds, part = 0.0, num_bytes
    for size, link in rings:
        steps = size - 1
        seconds += steps * (part / size / link.bandwidth + link.latency_s)
        part /= size
    return seconds


def reduce_scatter_s(num_bytes: float, rings: Iterable[Ring]) -> float:
    """Seconds of a reduce-scatter: T of the module's docstring, as it is an all-gather backwards.

    The sums themselves are not counted: memory, which bounds them, is several times as fast as any link.

    Args:
      num_bytes: of the whole buffer, as every device has it before.
      rings: of the group, the innermost first; none: one device, which takes no time.
    """
    return all_gather_s(num_bytes, rings)


def all_reduce_s(num_bytes: float, rings: Iterable[Ring]) -> float:
    """Seconds of an all-reduce: 2T of the module's docstring, a reduce-scatter and an all-gather.

    Args:
      num_bytes: of the whole buffer, before and after.
      rings: of the group, the innermost first; none: one device, which takes no time.
    """
    rings = tuple(rings)
    return reduce_scatter_s(num_bytes, rings) + all_gather_s(num_bytes, rings)


def send_s(num_bytes: float, link: Link, *, senders: int = 1) -> float:
    """Seconds of a message from one device to another, the hop of a pipeline: V · paths / W + L.

    Args:
      num_bytes: of the message.
      link: that joins the two; a message takes one of its paths, which share the bandwidth.
      senders: of the devices that have what they send in common (`Link.pooled`), how many send at once.
    """
    more = link.pooled / min(senders, link.pooled)
    return num_bytes * link.paths / (link.bandwidth * more) + link.latency_s
