"""Tests of a program without a run."""

import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from fiddlex.config import Config
from fiddlex.errors import DeviceError
from fiddlex.train.step.program import Program
from fiddlex.train.trainer import Trainer
from fiddlex.xla.ahead_of_time import compile_ahead

OTHERWISE = "Try another layout (mesh, pipeline), or another version of the compiler."
OF_STREAMS = (
    "takes multiples of 64 as model.hidden_size, and 96 is none: use one, or optimizer.zero1=False, or fewer replicas, "
    "or pipeline.weights_memory=device."
)


@pytest.mark.parametrize(
    ("platform", "weights_memory", "hidden_size", "compiler", "remedy"),
    [
        ("cpu", "device", 32, "jaxlib", OTHERWISE),
        ("tpu", "device", 32, "libtpu", OTHERWISE),
        ("tpu", "host", 64, "libtpu", OTHERWISE),
        ("tpu", "host", 96, "libtpu", OF_STREAMS),
    ],
)
def test_a_refusal_of_the_compiler_is_one_line(
    platform: str,
    weights_memory: str,
    hidden_size: int,
    compiler: str,
    remedy: str,
    tiny_config: Config,
) -> None:
    def compile_it(compiler_options: dict[str, Any]) -> None:
        raise jax.errors.JaxRuntimeError(f"INTERNAL: a check of {'shapes, ' * 99}\n\nSuspected Python Code Location:")

    tiny_config.pipeline.weights_memory, tiny_config.model.hidden_size = weights_memory, hidden_size
    tiny_config.mesh.data, tiny_config.optimizer.zero1 = 2, True
    device = types.SimpleNamespace(platform=platform, device_kind="a chip")
    mesh = types.SimpleNamespace(devices=np.array([device]))
    program: Any = types.SimpleNamespace(config=tiny_config, mesh=mesh, compiler_options={})
    lowered: Any = types.SimpleNamespace(compile=compile_it)
    with pytest.raises(
        DeviceError, match=f"^{compiler} .* does not compile the train step for a chip: INTERN"
    ) as raised:
        Program.compile(program, lowered)
    said = str(raised.value)
    assert "\n" not in said
    assert len(said) < 600
    assert said.endswith(remedy)


@pytest.mark.parametrize("use", [Trainer.compile, lambda trainer: compile_ahead(trainer.config, trainer.mesh)])
def test_runs_and_reports_compile_by_the_program(
    use: Callable[[Trainer], object], tiny_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise DeviceError("refused")

    trainer = Trainer(tiny_config)
    monkeypatch.setattr(Program, "compile", refuse)
    with pytest.raises(DeviceError, match=r"^refused$"):
        use(trainer)


def test_the_error_of_a_lost_process_is_none_of_the_compiler() -> None:
    def lost(compiler_options: dict[str, Any]) -> None:
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: the service is gone")

    program: Any = types.SimpleNamespace(compiler_options={})
    lowered: Any = types.SimpleNamespace(compile=lost)
    with pytest.raises(jax.errors.JaxRuntimeError, match="UNAVAILABLE"):
        Program.compile(program, lowered)
