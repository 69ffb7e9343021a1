from __future__ import annotations

import pytest

from tests.support.plugins import Site


@pytest.fixture
def site(tmp_path, monkeypatch):
    """An empty folder of fake distributions, first on ``sys.path``."""
    for name in ("QIAO_PLUGINS", "QIAO_SIM_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = Site(tmp_path)
    yield found
    found.forget()
