"""How much memory is free, from files such as Linux has in /proc and /sys/fs/cgroup."""

import pathlib
import sys

import pytest

from fiddlex.cluster.free_memory import MACHINE, Limit, limits, machine_id

MEMINFO = "MemTotal:  16000 kB\nMemFree:  100 kB\nMemAvailable:  8000 kB\nSwapFree:  500 kB\nHugePages_Total:  0\n"
MACHINES = Limit(MACHINE, 8000 * 1024, 500 * 1024)
STAT = "anon 3000\nfile 9999\ninactive_file 20\nactive_file 30\nslab_reclaimable 5\nunevictable 0\n"
VERSION_1_STAT = "cache 1\ninactive_file 1\ntotal_cache 9999\ntotal_inactive_file 20\ntotal_active_file 30\n"


def made(folder: pathlib.Path, **files: str) -> pathlib.Path:
    """A folder with these files, `__` in a name for `/` and `_DOT_` for a dot."""
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def group(path: str, limit: str, used: int = 4000) -> dict[str, str]:
    """The files of a group of version 2."""
    files = {"memory_DOT_max": f"{limit}\n", "memory_DOT_current": f"{used}\n", "memory_DOT_stat": STAT}
    return {f"sys__fs__cgroup__{path}{name}": text for name, text in files.items()}


def test_without_groups_the_machine_is_the_limit(tmp_path):
    assert limits(made(tmp_path, proc__meminfo=MEMINFO)) == [MACHINES]
    made(tmp_path, proc__self__cgroup="0::/\n")
    assert limits(tmp_path) == [MACHINES]


@pytest.mark.parametrize("text", [None, "", "MemTotal: 5 kB\n", "MemAvailable: much kB\n", "one\n"])
def test_where_the_machine_tells_nothing_there_is_no_limit(text, tmp_path):
    assert limits(made(tmp_path, **({} if text is None else {"proc__meminfo": text}))) == []


def test_each_group_of_version_2_and_those_around_it_are_limits(tmp_path):
    files = group("jobs__", "9000") | group("jobs__mine__", "5000") | group("jobs__mine__step__", "max")
    made(tmp_path, proc__meminfo=MEMINFO, proc__self__cgroup="0::/jobs/mine/step\n", **files)
    cache, swap = 20 + 30 + 5, MACHINES.swap
    inner = Limit("in control group /jobs/mine", 5000 - 4000 + cache, swap)
    assert limits(tmp_path) == [MACHINES, inner, Limit("in control group /jobs", 9000 - 4000 + cache, swap)]


def test_in_a_container_the_mount_is_its_group(tmp_path):
    files = group("", "5000", used=6000)
    made(tmp_path, proc__meminfo=MEMINFO, proc__self__cgroup="0::/docker/3f2\n", **files)
    assert limits(tmp_path) == [MACHINES, Limit("in control group /", 0, MACHINES.swap)]


def test_version_1_has_other_names(tmp_path):
    where = "sys__fs__cgroup__memory__slurm__memory_DOT_"
    files = {f"{where}limit_in_bytes": "5000\n", f"{where}usage_in_bytes": "4000\n", f"{where}stat": VERSION_1_STAT}
    lines = "9:name=systemd:/\n4:cpu,memory:/slurm\n0::/\n"
    made(tmp_path, proc__meminfo=MEMINFO, proc__self__cgroup=lines, **files)
    assert limits(tmp_path) == [MACHINES, Limit("in control group /slurm", 1050, MACHINES.swap)]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_this_machine_tells():
    (machine, *groups) = limits()
    assert machine.where == MACHINE
    assert machine.free > 0
    assert all(each.free >= 0 for each in groups)
    assert machine_id() == machine_id() != ""
