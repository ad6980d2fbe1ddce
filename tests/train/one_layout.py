"""Trains one layout in a process of its own: `one_layout.py CONFIG ROW`, with a config as JSON and a row of a table."""

import sys

import jax

from fiddlex.config import Config
from tests.train.layouts import case, check_layout

if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    check_layout(case(sys.argv[2]), Config.from_json(sys.argv[1]))
