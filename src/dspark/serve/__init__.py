"""Serving: many requests at once through one target and one drafter."""
