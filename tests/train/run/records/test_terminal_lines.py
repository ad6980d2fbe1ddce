"""What a log without a terminal says of a run."""

import itertools
import logging
import types

import pytest

from fiddlex.train.run.records import terminal_lines
from fiddlex.train.run.records.terminal_lines import Reporter


def test_time_left_counts_the_evaluations(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    monkeypatch.setattr(terminal_lines, "time", types.SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(logging.getLogger("fiddlex"), "propagate", True)
    caplog.set_level(logging.INFO)
    with Reporter(20, 50, eval_every=20) as shown:  # two seconds a step and ten an evaluation, at steps 40 and 50
        now += 5
        shown.compiled(5, was_kept=False)
        shown.begin()
        for previous, step in itertools.pairwise((20, 30, 40, 45, 50)):
            now += 2 * (step - previous)
            shown.advance(step)
            shown.record({"step": step, "loss": 1.0, "tokens_per_second": 1e3})
            if step in (40, 50):
                with shown.evaluating(step):
                    now += 10
                shown.record({"step": step, "eval_loss": 2.0})
    assert caplog.messages == [
        "Compiled the train step in 5.0 s.",
        "step 30/50  loss 1.0000  1,000 tokens/s  40 s and 2 evaluations left",
        "step 40/50  loss 1.0000  1,000 tokens/s  20 s and 2 evaluations left",
        "step 40/50  held-out loss 2.0000",
        "step 45/50  loss 1.0000  1,000 tokens/s  20 s left",  # 10 s of steps and the closing evaluation
        "step 50/50  loss 1.0000  1,000 tokens/s",
        "step 50/50  held-out loss 2.0000",
    ]
