"""Makes the notebooks of `experiments/notebooks/` from their text forms, and runs them.

    .venv/bin/python -m experiments.run_notebooks [--only=train_gpt_tiny --only=schedules …]

Each `.py` (jupytext) becomes the `.ipynb` beside it, with what its cells print and draw, for the site and for code
hosts; without `--only` all of them do, which takes some minutes. Warnings and logs (standard error) are left out, since
they tell of this machine. Cells run on the CPU, in a temporary folder.
"""

import os
import pathlib
import tempfile

import jupytext
import nbformat
from absl import flags
from nbclient import NotebookClient

from fiddlex.terminal.command_line import run

NOTEBOOKS = pathlib.Path(__file__).parent / "notebooks"
_NAMES = sorted(path.stem for path in NOTEBOOKS.glob("*.py"))
_ONLY = flags.DEFINE_multi_enum("only", _NAMES, _NAMES, "the notebooks to run")
_TIMEOUT_S = 600  # of a cell


def executed(source: pathlib.Path) -> nbformat.NotebookNode:
    """The notebook of a text form, with the outputs of its cells.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell fails.
    """
    notebook = nbformat.from_dict(jupytext.read(source))
    notebook.metadata.pop("jupytext", None)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=_TIMEOUT_S, kernel_name="python3", record_timing=False).execute(cwd=folder)
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"  # the same in every run
        if cell.cell_type == "code":
            cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]
    return notebook


def main(argv: list[str]) -> None:
    """Writes the notebooks."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    for name in _ONLY.value:
        nbformat.write(executed(NOTEBOOKS / f"{name}.py"), NOTEBOOKS / f"{name}.ipynb")
        print(f"experiments/notebooks/{name}.ipynb has the outputs of this run", flush=True)


if __name__ == "__main__":
    run(main)
