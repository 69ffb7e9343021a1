"""Qiao on Hygon DCUs: reserved, no hook of the contract is implemented yet."""
