"""Targets, drafters, and the reading of their weights."""
