"""The kit as a pytest plugin."""
