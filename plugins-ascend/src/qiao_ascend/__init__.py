"""Qiao on Huawei Ascend NPUs: reserved, no hook of the contract is implemented yet."""
