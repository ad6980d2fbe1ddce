"""Compiles the train step of a config ahead of time and tells what memory it takes; trains nothing and reads no data.

    python experiments/compile.py --config=configs/gpt_tiny.py [--topology=tpu:v5e:2x2 --format=json …]

The devices need not be there. Any field of the config can be overridden, as for train.py.
"""

import json

from absl import flags

from fiddlex.flags import define_config, run

_CONFIG = define_config()
_TOPOLOGY = flags.DEFINE_string(
    "topology", "cpu", "what to compile for: cpu, or TPUs as tpu:NAME:SHAPE (tpu:v5e:2x4; takes the extra aot)"
)
_FORMAT = flags.DEFINE_enum("format", "text", ["text", "json"], "json: one JSON object last on standard output")


def main(argv: list[str]) -> None:
    """Prints the report."""
    config = _CONFIG.value.validate()

    from fiddlex.mesh import describe, make_topology_mesh  # jax is imported once the command line is known to be right
    from fiddlex.train.ahead import compile_ahead, report

    mesh = make_topology_mesh(config.mesh, _TOPOLOGY.value)
    facts = {"topology": _TOPOLOGY.value, **report(config, compile_ahead(config, mesh))}
    if _FORMAT.value == "json":
        print(json.dumps(facts))
        return
    semantics = facts["semantics"].items()
    going_on = "".join(f"{name}: {ticks:g} ticks a batch\n" for name, ticks in semantics if name != "sync")
    print(
        f"{facts['num_parameters']:,} parameters, {describe(mesh)}\n"
        f"schedule {facts['schedule']}: {facts['num_stages']} stages, {facts['num_microbatches']} microbatches of "
        f"{facts['microbatch_size']}, {facts['num_ticks']} ticks, a stash for {facts['stash_slots']} "
        "forward passes of a stage\n"
        f"{going_on}"
        f"traced in {facts['trace_s']:.1f} s, compiled in {facts['compile_s']:.1f} s by jax {facts['jax_version']}\n"
        "memory of each device:"
    )
    for name, meaning in MEMORY.items():
        size = facts[f"{name}_bytes"]
        print(f"  {name:<9} {'not told' if size is None else f'{size / 1e6:,.1f} MB':>14}  {meaning}")


MEMORY = {
    "argument": "train state (unless flushed, also versions of the weights, stash and sums) and batch",
    "output": "train state and metrics",
    "alias": "of the output, in the place of arguments",
    "temp": "all else: compute weights, gradients, stash, workspace",
    "peak": "all together",
}


if __name__ == "__main__":
    run(main)
