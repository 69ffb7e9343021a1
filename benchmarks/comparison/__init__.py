"""Side-by-side measurement of Qiao and other CPU servers; ``benchmarks/peers.py`` is its command line."""
