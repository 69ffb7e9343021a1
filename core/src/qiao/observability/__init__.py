"""Metrics, logs and what this machine is: what an operator of a server sees."""
