"""The error tree. Everything a user can cause derives from :class:`DsparkError`; the command line turns it into one
line.

    DsparkError
    |- ConfigError       a field of a config, an option or an environment variable has a value we cannot use
    |- ModelError        a target cannot be found, read, or is of a kind we refuse
    |- CheckpointError   a drafter's folder is unreadable, incomplete, or does not fit the target
    |- DataError         prompts, answers or another input file is malformed
    |- ScheduleError     a scheduler was given a cost table or survivals it must not use
    |- RunError          a training run of several processes lost one of them
    '- RequestError      one generation request asks for something impossible (a prompt over the context limit, ...)

Messages name the field, the value and the remedy: ``block_size is 0; it must be 1 or more``.
"""


class DsparkError(ValueError):
    """Base of every error that bad input can cause."""


class ConfigError(DsparkError):
    """A config field, option or environment variable has an unusable value."""


class ModelError(DsparkError):
    """A target model cannot be found, read or used."""


class CheckpointError(DsparkError):
    """A drafter checkpoint is unreadable, incomplete or does not fit its target."""


class DataError(DsparkError):
    """An input file is malformed; the message names the file and line."""


class ScheduleError(DsparkError):
    """A scheduler was given survivals or a cost table that it must not use."""


class RunError(DsparkError):
    """A process of a training run is gone; what was saved stays valid."""


class RequestError(DsparkError):
    """One request asks for something that cannot be done."""
