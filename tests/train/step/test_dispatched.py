"""What the host asks of the devices when it has dispatched a step."""

import numpy as np
import pytest

from fiddlex.config import Config
from fiddlex.costs.utilisation import throughput
from fiddlex.train.step.dispatched import Dispatched, InFlight
from fiddlex.train.step.stopwatch import Stopwatch


class Scalar:
    """A metric on a device, which notes that its copy was asked for."""

    def __init__(self, value: float):
        self.value, self.asked = value, False

    def copy_to_host_async(self) -> None:
        self.asked = True

    def is_ready(self) -> bool:
        return True

    def __float__(self) -> float:
        assert self.asked, "the copy would wait for the next step"
        return self.value

    def __bool__(self) -> bool:
        return bool(float(self))


@pytest.mark.parametrize("more", [(), ("loss_scale",), ("spike",)])
def test_the_metrics_of_a_record_are_asked_for_at_once(more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config()
    in_flight = InFlight(throughput(config, "cpu"), Stopwatch(), config.train)
    metrics = dict.fromkeys(("loss", "grad_norm", "learning_rate", "weights_finite", *more))
    metrics = {name: Scalar(0.0 if name == "spike" else 2.0) for name in metrics}
    nonfinite = Scalar(0.0)
    monkeypatch.setattr("jax.device_get", lambda tree: tree)
    record = in_flight.record(in_flight.dispatched(1, {**metrics, "nonfinite": nonfinite}))
    assert (record["step"], record["loss"], record["grad_norm"]) == (1, 2.0, 2.0)
    assert record.get("loss_scale") == (2.0 if "loss_scale" in more else None)
    assert not nonfinite.asked  # is of interest only where something is not finite


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ([True, True], "Gradients that are not finite: all"),
        ([True, False], "Gradients that are not finite: embedding, head, layers.w (layers 0)"),
        ([False, False], "Gradients that are not finite: embedding, head"),
    ],
)
def test_layers_whose_gradients_are_finite_are_left_out(layers: list[bool], text: str) -> None:
    flags = {"embedding": np.array(True), "head": np.array(True), "layers": {"w": np.array(layers)}}
    done = Dispatched(1, {"loss": 1.0, "grad_norm": np.nan, "nonfinite": flags}, 0.0)
    assert done.describe("nonfinite", Config().train).endswith(f". {text}")
