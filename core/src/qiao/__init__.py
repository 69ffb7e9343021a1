"""Qiao: serve large language models on whatever accelerator a machine has."""
