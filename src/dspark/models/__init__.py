"""Targets, drafters, and the reading of their weights."""

# Tokens per position that a drafter's sequential stage weighs, where nobody says otherwise. Against 64, 256 raise the
# shipped drafter's acceptance length by 2 % (greedy) to 4 % (temperature 1) and cost 0.1 ms of a round of 30.
DEFAULT_CANDIDATES = 256
