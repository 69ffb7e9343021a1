"""Programs that run in the environments of the peers, each on its own; nothing here is imported by the benchmark."""
