"""``/v1/responses``: read (``asked``), answered (``answer``), kept (``store``), and run and followed (``service``)."""
