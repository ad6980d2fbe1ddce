"""Idle slots of the pipeline hold NaN in every test here: whatever reads one shows it."""

import functools
import math

import pytest

from fiddlex.pipeline.engine import Engine
from fiddlex.pipeline.executor import decode, execute
from fiddlex.train.inference import decoding, forward
from fiddlex.train.step import flushed, unflushed


@pytest.fixture(autouse=True)
def idle_slots_hold_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (flushed, forward):
        monkeypatch.setattr(module, "execute", functools.partial(execute, fill=math.nan))
    monkeypatch.setattr(decoding, "decode", functools.partial(decode, fill=math.nan))
    monkeypatch.setattr(unflushed, "Engine", functools.partial(Engine, fill=math.nan))
