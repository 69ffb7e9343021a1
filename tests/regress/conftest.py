import pytest


@pytest.fixture(autouse=True)
def exact_activations(monkeypatch):
    """The native plugin rounds activations of weight-only products to int8 unless told not to."""
    monkeypatch.setenv("QIAO_CPU_INT8_ACTIVATIONS", "0")
    try:
        from qiao_cpu import matmul
    except ImportError:
        return
    monkeypatch.setattr(matmul, "_ROUND", False, raising=False)
