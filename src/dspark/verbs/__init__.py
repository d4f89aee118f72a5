"""The verbs of the command line: options here, the work in the modules that a verb names."""
