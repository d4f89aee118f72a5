"""Pure functions of the method: no config, logger, file or process group in here."""
