"""Whatever arrives at the coordinator's port, it goes on serving the run's processes."""

import contextlib
import json
import socket
from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fiddlex.cluster.coordinator import Coordinator, Process
from tests.fuzz.mutants import ODD_JSON

NAMES = ("join", "ping", "alive", "peer_timeout", "failed", "finished", "stop", "dispatched", "", "x", "_on_join")
FIELDS = ("rank", "number", "host", "status", "collective", "x")
ODD = st.sampled_from([text for text in ODD_JSON if len(text) < 60_000])
OBJECTS = st.dictionaries(st.sampled_from(FIELDS), ODD, max_size=4).map(
    lambda fields: "{" + ", ".join(f"{json.dumps(name)}: {text}" for name, text in fields.items()) + "}"
)
MESSAGES = st.tuples(st.sampled_from(NAMES), ODD | OBJECTS).map(lambda each: f'{{"{each[0]}": {each[1]}}}\n'.encode())


@contextlib.contextmanager
def coordinator(*, has_begun: bool) -> Iterator[tuple[Coordinator, socket.socket]]:
    """A coordinator of three processes, and the connection of rank 0."""
    with socket.create_server(("localhost", 0)) as server, contextlib.ExitStack() as stack:
        own, theirs = map(stack.enter_context, socket.socketpair())
        made = Coordinator(server, theirs, address="h:1", number=3, timeout_s=1e6, sizes=[])
        made._service = object() if has_begun else None
        yield made, own
        made._selector.close()


def serve(made: Coordinator, process: Process, connection: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):
        connection.send(data)
    if any(key.data is process for key in made._selector.get_map().values()):
        made._serve(process)
    (made._meet if made._service is None else made._watch)()


@pytest.mark.parametrize("has_begun", [False, True])
def test_messages_of_a_process(has_begun: bool) -> None:
    @given(st.lists(MESSAGES | st.binary(max_size=40), min_size=1, max_size=4))
    @example([b'{"failed": {"status": 1e400, "collective": true}}\n'])
    @example([b'{"stop": -1e400}\n'])
    @example([b'{"peer_timeout": NaN}\n', b'{"alive": true}\n'])
    def run(messages: list[bytes]) -> None:
        with coordinator(has_begun=has_begun) as (made, own):
            for message in messages:
                serve(made, made._members.get(0) or Process(own, -1, ""), own, message)
            assert 0 < made._peer_timeout_s < 1e10

    run()


@pytest.mark.parametrize("has_begun", [False, True])
def test_messages_of_a_stranger_end_no_run_that_has_begun(has_begun: bool) -> None:
    @given(st.lists(MESSAGES | st.binary(max_size=40), min_size=1, max_size=4))
    def run(messages: list[bytes]) -> None:
        with coordinator(has_begun=has_begun) as (made, _), contextlib.ExitStack() as stack:
            stranger, theirs = map(stack.enter_context, socket.socketpair())
            made._add(theirs)
            process = made._selector.get_key(theirs).data
            for message in messages:
                serve(made, process, stranger, message)
            assert 0 in made._members
            assert not has_begun or not made._is_ending

    run()
