"""Compares Piper's partitioner of fiddlex with the one that its authors published, on random chains of layers.

    python -m third_party.piper.compare --published=CLONE --cases=400

CLONE is a clone of github.com/msr-fiddle/piper; `g++` compiles its program. In half of the cases a layer has one way to
run, in the others a second one with a third more time and a tenth of the stash. The published program chooses among
these by a heuristic, so that its pipelines may be slower there. Ends with status 1 if a pipeline of fiddlex is slower,
or if only one of both finds a pipeline.
"""

import argparse
import collections
import json
import pathlib
import random
import subprocess
import sys
import tempfile
from typing import Any

from fiddlex.errors import DeviceError
from fiddlex.tools.unequal_stages.chain import Chain, Choice, ShardedLayer, StageProblem
from fiddlex.tools.unequal_stages.piper import Piper

EQUAL = 1e-6  # relative difference of equal times: that of the published program's own checks


def main() -> None:
    """Compares, and prints how many of the pipelines are equal, faster and slower."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--published", required=True, type=pathlib.Path, help="clone of msr-fiddle/piper")
    parser.add_argument("--cases", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    choice = random.Random(options.seed)
    problems = [a_problem(choice, ways=1 + case % 2) for case in range(options.cases)]
    verdicts, gains = collections.Counter[str](), list[float]()
    for problem, published in zip(problems, published_seconds(options.published, problems), strict=True):
        try:
            found = Piper(problem).fastest()
            assert found is not None
            seconds = found.seconds
        except DeviceError:
            seconds = -1.0
        verdicts[verdict(seconds, published)] += 1
        gains += [1 - seconds / published] * (verdict(seconds, published) == "faster")
    print(", ".join(f"{number} {name}" for name, number in verdicts.most_common()), end="")
    print(f"; at most {max(gains):.1%} faster" if gains else "")
    sys.exit(verdicts["slower"] + verdicts["found by one alone"] > 0)


def verdict(seconds: float, published: float) -> str:
    """How fiddlex's pipeline compares; both take -1 where they find none."""
    if seconds < 0 or published < 0:
        return "without a pipeline" if seconds == published else "found by one alone"
    if abs(seconds - published) <= EQUAL * published:
        return "equal"
    return "faster" if seconds < published else "slower"


def a_problem(choice: random.Random, *, ways: int) -> StageProblem:
    """A chain of three to nine layers, two to twenty devices, and a cap on memory that often matters."""
    layers = [
        (choice.uniform(5e-3, 5e-2), choice.uniform(1e7, 6e8), choice.uniform(1e7, 5e8), choice.uniform(1e5, 3e7))
        for _ in range(choice.randint(3, 9))
    ]
    chains = {}
    for size in choice.choice([(1,), (1, 2)]):
        slower = 1.2 if size > 1 else 1.0
        chains[size] = Chain(
            tuple(
                ShardedLayer(
                    (
                        Choice(slower * seconds / size, stash / size, "vanilla"),
                        Choice(1.33 * slower * seconds / size, 0.1 * stash / size, "again"),
                    )[:ways],
                    output_bytes=output * (1.5 if size > 1 else 1.0),
                    weight_bytes=weights / size,
                    kept_bytes=2 * weights / size,
                )
                for seconds, stash, weights, output in layers
            )
        )
    memory, batch = choice.choice([1e9, 1.6e9, 2.5e9, 4e9, 3e10]), choice.choice([4, 12, 24, 64])
    return StageProblem(chains, choice.randint(2, 20), memory, 1e9, batch)


def published_seconds(clone: pathlib.Path, problems: list[StageProblem]) -> list[float]:
    """What the published program finds for each problem."""
    with tempfile.TemporaryDirectory() as folder:
        program, files = pathlib.Path(folder) / "piper", []
        for number, problem in enumerate(problems):
            files.append(pathlib.Path(folder) / f"{number}.json")
            files[-1].write_text(json.dumps(as_published(problem)))
        source = pathlib.Path(__file__).with_name("driver.cpp")
        subprocess.run(["g++", "-O2", "-std=c++17", f"-I{clone}", "-w", str(source), "-o", str(program)], check=True)
        done = subprocess.run([program, *files], check=True, capture_output=True, text=True)
    return [float(line) for line in done.stdout.splitlines()]


def as_published(problem: StageProblem) -> dict[str, Any]:
    """A problem in the form that the published program reads (its README.md)."""
    count = problem.num_layers
    outputs = [layer.output_bytes for layer in problem.chains[1].layers]
    nodes: list[dict[str, Any]] = [{"id": number, "TMPCs": {}} for number in range(count)]
    for size, chain in problem.chains.items():
        more = [layer.output_bytes - output for layer, output in zip(chain.layers, outputs, strict=True)]
        for number, layer in enumerate(chain.layers):
            nodes[number]["TMPCs"][str(size)] = [
                {
                    "id": way.recompute,
                    "timePerSample": way.seconds,
                    "parameterSize": layer.weight_bytes,
                    "memoryUsageA": way.stash_bytes,
                    "memoryUsageB": layer.kept_bytes,
                    "syncTimeFw": {str(number - 1): more[number - 1]} if number else {},
                    "syncTimeBw": {str(number + 1): more[number]} if number < count - 1 else {},
                }
                for way in layer.choices
            ]
    edges = [{"sourceId": n, "destId": n + 1, "communicationCost": outputs[n]} for n in range(count - 1)]
    return {
        "maxDevices": problem.num_devices,
        "maxMemoryPerDevice": problem.memory_bytes,
        "bandwidth": problem.bandwidth,
        "mbsInBatch": problem.num_microbatches,
        "nodes": nodes,
        "edges": edges,
    }


if __name__ == "__main__":
    main()
