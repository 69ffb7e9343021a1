"""Each test that asks for ``isa`` runs for every instruction set of the build that this processor can run."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("qiao_cpu") is None:  # `pip install ./plugins/cpu` needs a C++ compiler, and is optional
    collect_ignore_glob = ["test_*.py"]
else:
    from qiao_cpu import native

    native.start()
    _BEST, _THREADS = native.isa(), native.threads()


def pytest_generate_tests(metafunc):
    if "isa" in metafunc.fixturenames:
        metafunc.parametrize("isa", list(native.variants()), indirect=True)


@pytest.fixture
def isa(request):
    if not native.variants()[request.param]:
        pytest.skip(f"this processor cannot run {request.param}")
    native.select(request.param)
    yield request.param
    native.select(_BEST)


@pytest.fixture
def threads():
    """A function that sets the number of threads until the test ends."""
    yield native.set_threads
    native.set_threads(_THREADS)
