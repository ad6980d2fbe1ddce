"""Idle slots of the pipeline hold NaN in every test here: whatever reads one shows it."""

import functools
import math

import pytest

from fiddlex.pipeline.engine import Engine
from fiddlex.pipeline.executor import execute
from fiddlex.train import gradients, step, windowed


@pytest.fixture(autouse=True)
def idle_slots_hold_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gradients, step):
        monkeypatch.setattr(module, "execute", functools.partial(execute, fill=math.nan))
    monkeypatch.setattr(windowed, "Engine", functools.partial(Engine, fill=math.nan))
