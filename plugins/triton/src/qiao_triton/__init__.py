"""Triton kernels that Qiao's plugins for CUDA and DCU share, and hooks of the contract over them. A library, no plugin.

Nothing here imports Triton but ``qiao_triton.kernels`` and what uses it, so that a plugin can say what is missing.
"""

__all__: list[str] = []
