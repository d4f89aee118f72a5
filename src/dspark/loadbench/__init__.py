"""Servers under load: the same requests, sent the same way, to each of several servers in turn."""
