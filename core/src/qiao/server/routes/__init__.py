"""One module a group of routes; each has a ``router``."""
