"""The training loop and its optimiser."""
