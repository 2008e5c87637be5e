"""The one exception that commands turn into a line for the user."""


class UserError(Exception):
    """Input, flags or environment are at fault, not the program.

    The message names the file, line, flag or tensor and what was expected. The commands print it without a
    traceback and exit with status 2.
    """
