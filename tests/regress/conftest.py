"""Products are compared to the bit and to 1e-4, so the native plugin must not round activations."""

from tests.quantization.conftest import exact_activations

__all__ = ["exact_activations"]
