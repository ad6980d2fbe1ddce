"""What every test of the cluster does."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def programs_stay_shared() -> Iterator[None]:
    """Meshes of absent devices switch the cache of compiled programs off for the process; later tests need it."""
    yield
    jax.config.update("jax_enable_compilation_cache", True)
