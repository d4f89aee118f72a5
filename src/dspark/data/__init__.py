"""Prompts, answers, anchors and features: what training eats."""
