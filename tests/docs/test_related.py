"""docs/related.md: each place that it names exists."""

import re

import pytest

from fiddlex.config import Config
from fiddlex.config.config import check_field
from fiddlex.config.overrides import override
from tests.programs import ROOT

PAGE = (ROOT / "docs" / "related.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.startswith("| ")]
CODE = sorted({code for *_, place in ROWS for code in re.findall(r"`([^`]+)`", place)})
FIELDS = [code for code in CODE if re.match(r"[a-z]+\.[a-z0-9_]+(=|$)", code)]
FLAGS = [code for code in CODE if re.match(r"[a-z_]+( --[a-z_]+=?)?$", code)]
PAPERS = [
    *(
        "PipeDream",
        "PipeDream-2BW",
        "Efficient Large-Scale",
        "Piper",
        "Device placement",
        "CheckFreq",
        "CoorDL",
        "Gist",
    ),
    *("Harmony", "Daydream", "Themis", "Gavel", "Synergy", "Blox", "Blink", "Philly", "TBD", "POP", "HiveMind"),
    *("Parameter Hub", "Deep learning over RDMA", "Dynamic pricing", "Transient servers", "Spectral bounds"),
    *("Megatron-LM", "Sequence parallelism", "Zero bubble", "Controllable memory", "DualPipe", "GPipe", "Chimera"),
]


def test_every_piece_of_code_is_a_place_that_is_checked():
    assert {*CODE} == {*FIELDS, *FLAGS}
    assert len(FIELDS) > 20
    assert len(FLAGS) > 5


@pytest.mark.parametrize("paper", PAPERS)
def test_the_paper_is_there(paper: str) -> None:
    assert [row for row in ROWS if f"**{paper}" in row[0]]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} {row[1]}"[:40])
def test_the_row_has_a_place_or_a_reason(row: list[str]) -> None:
    assert re.search(r"\]\(\.\./|`|, because .{20}|^in fiddlex$", row[2])


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(((?!http)[^)#]+)", PAGE))))
def test_the_file_exists(link: str) -> None:
    assert (ROOT / "docs" / link).exists()


@pytest.mark.parametrize("code", FIELDS)
def test_the_field_exists_and_takes_the_value(code: str) -> None:
    path, is_set, _ = code.partition("=")
    check_field(path)
    if is_set:
        section = path.partition(".")[0]
        getattr(override(Config(), "mesh.sequence_parallel=true", code), section).validate()


@pytest.mark.parametrize("code", FLAGS)
def test_the_command_and_its_flag_exist(code: str) -> None:
    command, _, flag = code.partition(" --")
    source = (ROOT / "fiddlex" / "commands" / f"{command}.py").read_text(encoding="utf-8")
    assert not flag or re.search(rf'(DEFINE_\w+|define_path)\(\s*"{flag.rstrip("=")}"', source)
