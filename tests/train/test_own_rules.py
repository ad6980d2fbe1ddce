"""Semantics and update rules that functions in a user's file give: what they train, keep, and say of mistakes."""

import copy
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fiddlex.config import Config
from fiddlex.costs.backend import backend_of
from fiddlex.costs.weight_memory import weight_bytes
from fiddlex.data import Loader
from fiddlex.errors import CheckpointError, ConfigError
from fiddlex.schedules.semantics import make_phases, make_semantics
from fiddlex.train import loop
from fiddlex.train.run.changed_rate import changed_rate
from fiddlex.train.step.optimizer import learning_rate_schedule
from fiddlex.train.step.own_rate import check_own_rate
from fiddlex.train.step.own_rule import check_own_rule, own_rule
from fiddlex.train.trainer import Trainer, load_trainer
from tests import programs, reference, reference_llama
from tests.programs import ROOT

PAGE = (ROOT / "docs" / "semantics.md").read_text(encoding="utf-8")


RULE = "def mine(*, config):\n    return {}\nmine.moments, mine.elementwise = {}, True"
WHOLE = RULE.replace("True", "False")
WEIGHTS = {  # of a small model
    "embedding": {"tokens": jax.ShapeDtypeStruct((50, 4), jnp.float32)},
    "layers": [{name: jax.ShapeDtypeStruct((6, 4)[n:], jnp.float32) for n, name in enumerate(("kernel", "bias"))}] * 3,
}


def written(file: pathlib.Path, text: str) -> None:
    file.write_text(f"import jax\nimport jax.numpy as jnp\nimport optax\n\n{text}\n")


def example(name: str) -> str:
    """The Python code of an example of the page."""
    return PAGE.split(f"<!-- {name} -->\n```python\n")[1].split("```")[0]


@pytest.fixture
def file(tmp_path: pathlib.Path) -> pathlib.Path:
    """A file with the page's functions, and delays that rise and fall from stage to stage."""
    uneven = "\n\ndef uneven(*, num_stages, num_microbatches):\n    return [1, 0, 3, 2][:num_stages]\n"
    (tmp_path / "rules.py").write_text(example("own-rules") + uneven)
    return tmp_path / "rules.py"


@pytest.fixture
def config(tiny_config: Config, file: pathlib.Path) -> Config:
    """A Llama with tables of its own for embedding and head, in four stages on two ranks and two replicas."""
    model, optimizer, pipeline = tiny_config.model, tiny_config.optimizer, tiny_config.pipeline
    model.family, model.num_layers, model.ffn_size, model.tied_embeddings = "llama", 5, 48, False
    tiny_config.mesh.data = tiny_config.mesh.pipe = 2
    pipeline.schedule, pipeline.num_chunks, pipeline.num_microbatches = "interleaved_1f1b", 2, 2
    pipeline.semantics, optimizer.name = f"{file}:halves", f"{file}:mean_of_two"
    optimizer.schedule, optimizer.learning_rate, optimizer.epsilon = "constant", 1e-3, 1e-5
    return tiny_config


def stages_of(weights: Any, layers_per_stage: tuple[int, ...]) -> list[Any]:
    """The weights as a list with those of each stage; the first has the embedding, the last the head."""
    weights, first = reference.unstack(weights), 0
    stages = []
    for count in layers_per_stage:
        stages.append({"layers": weights["layers"][first : first + count]})
        first += count
    stages[0]["embedding"], stages[-1]["head"] = weights["embedding"], weights["head"]
    return stages


@pytest.mark.parametrize(
    ("function", "delays", "offload"), [("halves", (1, 1, 0, 0), False), ("uneven", (1, 0, 3, 2), True)]
)
def test_a_run_trains_as_the_plain_loop_of_the_page_does(
    function: str, delays: tuple[int, ...], offload: bool, config: Config, file: pathlib.Path
) -> None:
    config.pipeline.semantics, config.optimizer.offload = f"{file}:{function}", offload
    trainer = Trainer(config)
    layers, initial = trainer.layout.placement.layers_per_stage, trainer.weights()
    loader = Loader(trainer.dataset.train, global_batch_size=16, seed=0, vocab_size=257)

    @jax.jit
    def loss(stages: list[Any], batch: Any) -> jax.Array:
        weights = {"embedding": stages[0]["embedding"], "head": stages[-1]["head"]}
        weights["layers"] = [layer for stage in stages for layer in stage["layers"]]
        return reference_llama.loss_fn(weights, batch, jnp.int32(0), config)

    names = {"jax": jax}
    exec(example("own-rules-oracle"), names)
    losses, wanted = names["plain"](  # type: ignore[operator]
        loss,
        stages_of(initial, layers),
        [loader.batch(step) for step in range(8)],
        delays=delays,
        rule=own_rule(config.optimizer),
        learning_rate=1e-3,
    )
    records = list(trainer.steps(8))
    np.testing.assert_allclose([record["loss"] for record in records], losses, rtol=1e-5)
    found = stages_of(trainer.weights(), layers)
    for weight, exact in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.linalg.norm(weight - exact) < 1e-5 * np.linalg.norm(exact)


def test_decay_rate_and_clipping_are_those_of_other_rules(config: Config, file: pathlib.Path) -> None:
    page = str(file.rename(file.with_name("page.py"))) + ":mean_of_two"
    written(file, RULE.format("optax.scale_by_adam(config.beta1, config.beta2, config.epsilon)", 2))
    config.pipeline.semantics, config.optimizer.weight_decay, config.optimizer.clip_norm = "sync", 0.1, 0.5
    config.optimizer.schedule, config.optimizer.warmup_steps = "linear", 2
    found = []
    for name in (f"{file}:mine", "adamw"):
        config.optimizer.name = name
        trainer = Trainer(config)
        found.append((list(trainer.steps(4)), trainer.weights(), weight_bytes(config, 2, backend_of(None))))
    (ours, weights, ours_bytes), (theirs, exact, their_bytes) = found
    for name in ("loss", "grad_norm", "learning_rate"):
        assert [each[name] for each in ours] == [each[name] for each in theirs]
    jax.tree.map(np.testing.assert_array_equal, weights, exact)
    assert ours_bytes == their_bytes
    config.optimizer.name = page
    assert 2 * weight_bytes(config, 2, backend_of(None)).optimizer == 3 * their_bytes.optimizer


def test_a_run_goes_on_where_its_file_was_moved_and_is_evaluated_without_it(
    config: Config, file: pathlib.Path, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    workdir, steps = tmp_path / "run", config.train.num_steps
    config.train.checkpoint_every = 2
    whole = list(Trainer(config).steps(steps))[-1]["loss"]
    config.train.num_steps = 3
    loop.train(config, workdir)
    moved = file.rename(tmp_path / "moved.py")
    assert load_trainer(workdir).evaluate()["step"] == 3
    file.write_text("open('/nonexistent/was run')")  # what the workdir names is never run
    assert load_trainer(workdir).evaluate()["step"] == 3
    config.pipeline.semantics, config.optimizer.name = f"{moved}:halves", f"{moved}:mean_of_two"
    config.train.num_steps = steps
    with caplog.at_level("INFO"):
        assert loop.train(config, workdir).step == steps
    assert f"optimizer.name '{file}:mean_of_two' → '{moved}:mean_of_two'" in caplog.text
    assert (workdir / "metrics.jsonl").read_text().count(repr(whole)) >= 1
    config.optimizer.name = "adamw"
    with pytest.raises(CheckpointError, match=r"optimizer\.name is 'adamw', was 'PATH.py:mean_of_two'"):
        loop.train(config, workdir)


@pytest.mark.parametrize(
    ("text", "function", "message"),
    [
        (
            "",
            "mine",
            r"rules.py has no function 'mine'. Write one that begins with def mine\(\*, num_stages, num",
        ),
        ("def mine(): return 1", "", "name a function of the file too, as in .*rules.py:mine"),
        ("def mine(stages): return 1", "mine", r"rules.py has mine\(stages\), which cannot be called with num"),
        (
            "def mine(**sizes): return 1",
            "mine",
            r"for num_stages=4 it returned 1\. It must return a tuple",
        ),
        ("def mine(**sizes): return (0, 1)", "mine", r"it returned \(0, 1\)\. .* an integer from 0 to 999"),
        ("def mine(**sizes): return (0, 1, -1, 0)", "mine", r"it returned \(0, 1, -1, 0\)"),
        ("def mine(**sizes): return (0, 1, 1000, 0)", "mine", r"it returned \(0, 1, 1000, 0\)"),
        ("def mine(**sizes): return (0, 1, True, 0)", "mine", r"it returned \(0, 1, True, 0\)"),
        ("def mine(**sizes): return 1 / 0", "mine", r"rules.py, line 5: ZeroDivisionError: division by zero"),
        ("1 / 0", "mine", r"rules.py, line 5: ZeroDivisionError"),
    ],
)
def test_mistakes_in_semantics_are_told(text: str, function: str, message: str, file: pathlib.Path) -> None:
    written(file, text)
    name = f"{file}:{function}" if function else str(file)
    with pytest.raises(ConfigError, match=rf"^pipeline\.semantics {name}: .*{message}"):
        make_semantics(name, num_stages=4, batch_size=4)


def test_phases_have_semantics_of_ones_own(file: pathlib.Path) -> None:
    name = f"{file}:halves"
    assert make_phases("sync", f"sync:0.2,{name}:3,{name}", 10) == (("sync", 0, 2), (name, 2, 5), (name, 5, 10))
    with pytest.raises(ConfigError, match=r"^pipeline\.semantics_schedule .*: .* has no function 'thirds'"):
        make_phases("sync", f"sync:0.2,{file}:thirds", 10)


PLAIN = "optax.scale_by_adam()"
COUNT = "lambda w: jnp.zeros((), jnp.int32)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"has no function 'mine'. Write one that begins with def mine\(\*, config\)\."),
        ("def mine(**config): return 1", "the function does not say how many float32 numbers its rule keeps for each"),
        (RULE.format(PLAIN, 2).replace(", True", ", 1"), "the function has elementwise=1, which does not say whether"),
        ("def mine(**config): return 1\nmine.moments = 2", "does not say whether its rule .* or False if"),
        (
            RULE.format(PLAIN, -1),
            r"the function has moments=-1 for each weight, an integer from 0\. ",
        ),
        (RULE.format(PLAIN, 1.5), r"the function has moments=1\.5"),
        (RULE.format("optax.scale_by_lbfgs(memory_size=5)", 12), r"an array of shape \(5, .*, which no weight has"),
        *[
            (
                RULE.format(f"optax.GradientTransformation({init}, lambda g, s, w: (g, s))", 1),
                "tell which array belongs",
            )
            for init in (
                "jax.tree.leaves",
                "lambda w: tuple(jax.tree.leaves(w))",
                "lambda w: (w['layers'], w['embedding'])",
            )
        ],
        (RULE.format(PLAIN, 1), "says moments = 1, and the state of its rule has 2 float32 numbers for each weight"),
        (RULE.format("1", 1), "it returned 1; it must return an optax.GradientTransformation"),
        (RULE.format("1 / 0", 1), "rules.py, line 6: ZeroDivisionError"),
        (
            RULE.format("optax.chain(optax.scale_by_adam(), optax.scale_by_trust_ratio())", 2),
            "weights that are cut in halves",
        ),
        (
            RULE.format("optax.add_decayed_weights(0.1, lambda w: jax.tree.map(lambda x: x.ndim > 1, w))", 0),
            "weights that are stacked over layers and padded with zeros other updates than the same weights",
        ),
        (RULE.format("optax.clip_by_global_norm(0.1)", 0), r"elementwise = True, .* Say elementwise = False, and the"),
        (RULE.format("optax.adam(1e-3)", 2), r"updates point against the gradients, .* or turn it around"),
        (WHOLE.format("optax.lamb(1e-3)", 2), r"updates point against the gradients, .* or turn it around"),
        (RULE.format("optax.contrib.reduce_on_plateau()", 0), r"required keyword-only argument: 'value'\. A rule's"),
        (
            RULE.format("optax.GradientTransformation(optax.identity().init, lambda g, s: (g, s))", 0),
            "2 positional arg",
        ),
        (
            RULE.format("optax.stateless(lambda g, w: jax.tree.map(lambda x: x.astype(jnp.bfloat16), g))", 0),
            r"turns gradients \['embedding'\]\['tokens'\] of float32\[50, 4\] into bfloat16\[50, 4\]\. A rule must",
        ),
        (RULE.format("optax.stateless(lambda g, w: jax.tree.leaves(g))", 0), r"turns gradients \{'embedding.* into \["),
        (
            RULE.format("optax.GradientTransformation(lambda w: jnp.ones(()), lambda g, s, w: (g, s / 0))", 0),
            "numbers in its state that are not finite",
        ),
        (RULE.format("optax.stateless(lambda g, w: 1 / 0)", 0), "rules.py, line 6: ZeroDivisionError"),
        (
            RULE.format("optax.add_noise(0.1, 0.1, jax.random.key(0))", 0),
            "its state has a random key, which checkpoints cannot hold",
        ),
        (RULE.format("optax.stateless(lambda g, w: jax.tree.map(lambda x: x * jnp.nan, g))", 0), "are not finite"),
        (
            RULE.format(f"optax.GradientTransformation({COUNT}, lambda g, s, w: (g, s + 0.5))", 0),
            r"turns its state int32\[\] into float32\[\]\. A rule's state must keep its structure, shapes and dtypes",
        ),
        (
            RULE.format(f"optax.GradientTransformation({COUNT}, lambda g, s, w: (g, (s, s)))", 0),
            r"turns its state int32\[\] into \('int32\[\]', 'int32\[\]'\)\. A rule's state must keep",
        ),
    ],
)
def test_mistakes_in_a_rule_are_told(text: str, message: str, file: pathlib.Path, config: Config) -> None:
    written(file, text)
    config.optimizer.name = f"{file}:mine"
    with pytest.raises(ConfigError, match=rf"(?s)^optimizer\.name {file}:mine: .*{message}"):
        check_own_rule(config.optimizer, WEIGHTS)


def test_a_rule_cannot_change_the_config(file: pathlib.Path, config: Config) -> None:
    written(file, "def mine(*, config):\n    config.learning_rate = 0.0\n    return optax.identity()\n")
    file.write_text(f"{file.read_text()}mine.moments, mine.elementwise = 0, True\n")
    config.optimizer.name = f"{file}:mine"
    check_own_rule(config.optimizer, WEIGHTS)
    assert config.optimizer.learning_rate == 1e-3


def test_a_rule_of_whole_weights_is_refused_where_weights_come_one_by_one(file: pathlib.Path, config: Config) -> None:
    written(file, WHOLE.format("optax.clip_by_global_norm(0.1)", 0))
    config.optimizer.name = f"{file}:mine"
    check_own_rule(config.optimizer, WEIGHTS)
    config.optimizer.offload = True
    with pytest.raises(
        ConfigError, match=r"elementwise = False with optimizer\.offload=true\. .* rule that is element"
    ):
        check_own_rule(config.optimizer, WEIGHTS)
    # Elementwise, with another rule for the weight that comes last.
    last = "def last(g, w):\n    *others, each = jax.tree.leaves(g)\n"
    last += "    return jax.tree.unflatten(jax.tree.structure(g), [*others, 2 * each])\n"
    written(file, last + RULE.format("optax.stateless(last)", 0))
    with pytest.raises(ConfigError, match=r"weights that come one at a time \(optimizer\.offload=true\) other updates"):
        check_own_rule(config.optimizer, WEIGHTS)


def test_state_that_layers_do_not_share_is_refused(file: pathlib.Path, config: Config) -> None:
    first = (
        "def first(w):\n    layers = [x if i else jax.tree.map(lambda _: (), x) for i, x in enumerate(w['layers'])]\n"
    )
    first += "    return w | {'layers': layers}\n"
    written(file, first + WHOLE.format("optax.GradientTransformation(first, lambda g, s, w: (g, s))", 1))
    config.optimizer.name, config.pipeline.semantics = f"{file}:mine", "2bw"
    with pytest.raises(ConfigError, match=r"has \['.* for only one of layer 0 and layer 1\. Layers move from device"):
        Trainer(config)


RATE = "def mine(*, config, num_steps):\n    return {}"


def test_a_rate_of_ones_own_is_that_of_each_update(file: pathlib.Path, config: Config) -> None:
    written(file, RATE.format("optax.linear_schedule(config.learning_rate, 0.0, num_steps)"))
    config.optimizer.schedule, config.optimizer.decay_steps = f"{file}:mine", 4
    check_own_rate(config.optimizer, 9)
    found = [float(learning_rate_schedule(config.optimizer, 9)(count)) for count in range(6)]
    np.testing.assert_allclose(found, [1e-3, 7.5e-4, 5e-4, 2.5e-4, 0, 0], rtol=1e-6)
    saved = copy.deepcopy(config)
    saved.optimizer.schedule = "/nonexistent/moved.py:mine"  # what a workdir names is never run
    assert not changed_rate(saved, config, 2)
    saved.optimizer.decay_steps = 8
    assert "from 0.000875 in update 2 to 0.0005 in the next one, for which" in changed_rate(saved, config, 2)
    config.optimizer.schedule = "linear"
    assert not changed_rate(saved, config, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"has no function 'mine'. Write one that begins with def mine\(\*, config, num_steps\)\."),
        ("def mine(*, config): return 1", r"cannot be called with config, num_steps"),
        (RATE.format("0.1"), r"it returned 0\.1; it must return a schedule of optax, .* use optax\.constant_schedule"),
        (RATE.format("1 / 0"), "rules.py, line 6: ZeroDivisionError"),
        (RATE.format("lambda count: 1 / 0"), "rules.py, line 6: ZeroDivisionError"),
        (RATE.format("lambda count: 0.1 if count < 3 else 0.2"), r"TracerBoolConversionError\)\. Choose .* jnp\.where"),
        (RATE.format("lambda count: jnp.ones(3)"), r"gives an array of shape \(3,\); it must give one number"),
        (RATE.format("lambda count: 'fast'"), "rules.py: ValueError: could not convert string"),
        (
            RATE.format("lambda count: 3.0 - count"),
            r"gives the learning rate -1\.0 after 4 updates\. It must be finite",
        ),
        (RATE.format("lambda count: 1 / (count - 2)"), r"gives the learning rate -.* after 0 updates"),
    ],
)
def test_mistakes_in_a_rate_are_told(text: str, message: str, file: pathlib.Path, config: Config) -> None:
    written(file, text)
    config.optimizer.schedule = f"{file}:mine"
    with pytest.raises(ConfigError, match=rf"(?s)^optimizer\.schedule {file}:mine: .*{message}"):
        check_own_rate(config.optimizer, 10)


def test_predictions_that_need_momentum_are_refused(config: Config) -> None:
    config.pipeline.prediction = "momentum"
    with pytest.raises(ConfigError, match=r"no momentum of this optimizer is known, .* Use another optimizer, or use"):
        config.validate()
    config.pipeline.prediction = "extrapolate"
    list(Trainer(config).steps(1))


def test_commands_take_functions_of_ones_own(file: pathlib.Path) -> None:
    own = (f"--config.pipeline.semantics={file}:halves", f"--config.optimizer.name={file}:mean_of_two")
    pipe = ("--config=gpt_tiny", "--config.mesh.pipe=4", "--config.pipeline.num_chunks=1", "--topology=a100_80")
    step = programs.call("what_if", *pipe, own[0], f"--change=optimizer={file}:mean_of_two").stdout
    assert [line.split()[0] for line in step.splitlines()[1:]] == ["as", f"optimizer={file}:mean_of_two"]
    plan = ("--config=gpt_tiny", "--topology=a100_80", "--num_devices=4", "--keep=1", own[1])
    assert "optimizer" in programs.call("plan", *plan).stdout
    drawn = programs.call("schedule", "--name=1f1b", "--pipe=4", "--microbatches=8", f"--semantics={file}:halves")
    assert f"{file}:halves" in drawn.stdout
