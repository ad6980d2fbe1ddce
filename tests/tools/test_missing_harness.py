import importlib
import sys

import pytest

from fiddlex.errors import ConfigError


def test_the_extra_is_named_where_the_harness_is_not_installed(monkeypatch):
    for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "fiddlex.tools.harness", raising=False)
    with pytest.raises(ConfigError, match=r"takes the extra `lm-eval` \(.* -m pip install 'fiddlex\[lm-eval\]'\): "):
        importlib.import_module("fiddlex.tools.harness")
