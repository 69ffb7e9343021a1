"""Qiao on NVIDIA GPUs: reserved, no hook of the contract is implemented yet."""
