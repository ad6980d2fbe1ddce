"""Settings of hypothesis under which a mutation is caught soon, and by the same example every time.

A pytest plugin (`-p tests.mutations.plugin`). Failing examples are neither made smaller, which can take minutes, nor
kept, since another mutation would be caught by them.
"""

import hypothesis
import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Comes after `tests/conftest.py` has loaded its own profile."""
    del config
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("mutations", phases=phases, derandomize=True, database=None, deadline=None)
    hypothesis.settings.load_profile("mutations")
