"""`fiddlex benchmark` as a script: `fiddlex/commands/benchmark.py` has what it does and its flags."""

from fiddlex.commands.benchmark import main
from fiddlex.config.command_line import run

if __name__ == "__main__":
    run(main)
