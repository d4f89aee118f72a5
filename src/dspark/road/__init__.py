"""The whole road with defaults: from a model's name to a drafter that makes it faster, within a budget of time."""
