"""Scripts of the repository itself; run from its root as ``python -m tools.NAME``."""
