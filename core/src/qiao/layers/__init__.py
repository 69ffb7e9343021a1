"""Building blocks of decoders: plain callables over an OpTable, each holding its own weights where they are read."""
