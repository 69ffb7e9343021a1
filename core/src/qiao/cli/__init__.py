"""The ``qiao`` command. One module per subcommand, each with ``register(app)``; ``main`` assembles them."""
