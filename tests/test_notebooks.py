"""The notebooks run from top to bottom, and both of their halves say the same."""

import json
import pathlib
import sys

import jupytext
import nbformat
import pytest
from nbclient import NotebookClient

from tests.programs import call

NOTEBOOKS = pathlib.Path(__file__).parent.parent / "experiments" / "notebooks"
SOURCES = sorted(NOTEBOOKS.glob("*.py"))
SLOW = {"flax_module", "from_huggingface_and_back", "schedules", "semantics", "train_gpt_tiny"}  # run in a kernel only
# Run in the kernel first. `python -W` will not do: its module is a whole name, and "fiddlex" is not "fiddlex.config".
STRICT = r"import warnings; warnings.filterwarnings('error', module=r'fiddlex\b|__main__$')"


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_both_halves_agree(source: pathlib.Path) -> None:
    text = jupytext.read(source)
    notebook = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    cells = [[(cell.cell_type, cell.source) for cell in half.cells] for half in (text, notebook)]
    remedy = f"edit {source.name}, then run: python -m experiments.run_notebooks --only={source.stem}"
    assert cells[0] == cells[1], remedy
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)], remedy  # run once, from the top
    outputs = [output for cell in code for output in cell.outputs]
    assert outputs, remedy
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]


@pytest.mark.parametrize("source", [path for path in SOURCES if path.stem not in SLOW], ids=lambda path: path.stem)
def test_its_cells_run_as_a_program(source: pathlib.Path, tmp_path: pathlib.Path) -> None:
    call(source, cwd=tmp_path, environment={"MPLBACKEND": "agg"}, strict=True)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning:jupyter_client", "ignore::DeprecationWarning:zmq")
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_it_runs_in_a_kernel(source: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A kernel of this very interpreter, whatever kernels the machine has.
    kernel = tmp_path / "kernels" / "python3"
    kernel.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": command, "display_name": "Python 3", "language": "python"}
    (kernel / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = jupytext.read(source)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(STRICT))
    client = NotebookClient(notebook, timeout=300, kernel_name="python3")
    client.execute(cwd=str(tmp_path))
