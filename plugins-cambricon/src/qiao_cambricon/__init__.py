"""Qiao on Cambricon MLUs: reserved, no hook of the contract is implemented yet."""
