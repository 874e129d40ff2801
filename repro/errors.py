"""The one exception that a user can cause."""


class ReproError(Exception):
    """Something a user asked for cannot be done.

    The message is one sentence that names what was wrong and what would be right. The command line prints it
    and exits with code 2, without a traceback.
    """
