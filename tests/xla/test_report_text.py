"""What the text of the report on a compiled step says of the memory of hosts and of copies there."""

from typing import Any

from fiddlex.xla.report_text import host_copies_lines, host_shortage

GIB = 2**30


def copy(*, to_host: bool, mb: float, products: int) -> dict[str, Any]:
    return {"name": "copy", "to_host": to_host, "bytes": round(mb * 1e6), "products": products}


def test_copies_beside_products_are_told_from_those_beside_none() -> None:
    copies = [
        copy(to_host=True, mb=1.5, products=6),
        copy(to_host=True, mb=2, products=1),
        copy(to_host=True, mb=0.25, products=0),
        copy(to_host=False, mb=4, products=2),
    ]
    assert host_copies_lines(copies) == [
        "asynchronous copies of each device, each counted once although loops repeat it:",
        "  to the host       2 copies        3.3 MiB  while matrix products run",
        "  to the host       1 copies        0.2 MiB  while none runs",
        "  from the host     1 copies        3.8 MiB  while matrix products run",
    ]
    assert host_copies_lines([]) == []


def test_a_lack_of_pinned_memory_names_the_field_that_says_how_much_there_is() -> None:
    facts = {"host_needed_bytes": 70 * GIB, "host_limit_bytes": 64 * GIB, "host_limit_is_pinned_gib": True}
    text = host_shortage(facts)
    assert text.startswith(
        "does not fit the memory of the host: 70.00 GiB needed, 64.00 GiB there for each device as pinned memory "
        "(pinned_gib of the topology's file; set it in a file of your own if the processes that train have another "
        "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB). What may help: more devices"
    )
    assert "pinned" not in host_shortage(facts | {"host_limit_is_pinned_gib": False})
    assert host_shortage(facts | {"host_needed_bytes": 64 * GIB}) == ""
