"""`fiddlex benchmark` as a script, which can also measure other systems beside fiddlex (`--against`).

`fiddlex/commands/benchmark.py` has what it does without `--against`, and its flags; `experiments/benchmarks/against.py`
with it.
"""

import pathlib
import sys

from fiddlex.terminal.command_line import run

if __name__ == "__main__":
    if any(argument.lstrip("-").split("=")[0] == "against" for argument in sys.argv[1:]):
        sys.path.append(str(pathlib.Path(__file__).parents[1]))  # for drivers of third_party/
        from experiments.benchmarks.against import main
    else:
        from fiddlex.commands.benchmark import main
    run(main)
