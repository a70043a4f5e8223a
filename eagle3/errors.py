"""The one exception for what a user can mend. Entry scripts print it as one line, without a traceback."""


class InputError(ValueError):
    """Bad config or bad data: the message names the config key or row, the value, the rule and the way out."""


class Interrupted(Exception):
    """The user or the scheduler asked to stop and the state is saved; the message says how to go on."""
