"""Which libtpu compiles, and which one the installed jax names."""

import importlib.machinery
import importlib.metadata
import importlib.util

import pytest

from fiddlex.hardware.compilers import libtpu_that_jax_names, libtpu_version, other_libtpu


@pytest.mark.parametrize(
    ("requirements", "named"),
    [
        (["jaxlib<=0.10.2,>=0.10.2", 'libtpu==0.0.42.*; extra == "tpu"', "numpy>=2.0"], "0.0.42"),
        (['libtpu==0.0.50.1; extra == "tpu"'], "0.0.50.1"),
        (["jaxlib"], ""),
        (None, ""),
    ],
)
def test_the_libtpu_that_jax_names(requirements, named, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "requires", {"jax": requirements}.get)
    assert libtpu_that_jax_names() == named


def test_the_installed_jax_names_a_libtpu():
    assert libtpu_that_jax_names().startswith("0.0.")


@pytest.mark.parametrize(("used", "named"), [("0.0.42", "0.0.42"), ("0.0.42.1", "0.0.42"), ("0.0.52", "")])
def test_the_libtpu_of_jax_needs_no_word(used, named):
    assert other_libtpu(used, named) == ""


@pytest.mark.parametrize("used", ["0.0.52", "0.0.4", "0.0.421", "/mine/libtpu.so"])
def test_another_libtpu_is_named_beside_that_of_jax(used):
    said = other_libtpu(used, "0.0.42")
    assert said.startswith(f"Compiled by libtpu {used}. The installed jax names libtpu 0.0.42, which may compile")
    assert said.endswith("pip install 'libtpu==0.0.42.*'.")


def test_a_library_that_the_user_has_set_is_the_one_that_compiles(monkeypatch):
    monkeypatch.setenv("TPU_LIBRARY_PATH", "/mine/libtpu.so")
    assert libtpu_version() == "/mine/libtpu.so"


def test_the_library_that_the_package_itself_sets_has_the_packages_version(monkeypatch):
    package = importlib.machinery.ModuleSpec("libtpu", None, origin="/site-packages/libtpu/__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", {"libtpu": package}.get)
    monkeypatch.setattr(importlib.metadata, "version", {"libtpu": "0.0.52"}.get)
    monkeypatch.setenv("TPU_LIBRARY_PATH", "/site-packages/libtpu/libtpu.so")
    assert libtpu_version() == "0.0.52"
