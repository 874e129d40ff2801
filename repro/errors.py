"""What a user can cause."""


class ReproError(Exception):
    """Something a user asked for cannot be done.

    The message is one sentence that names what was wrong and what would be right. The command line prints it
    and exits with code 2, without a traceback.
    """


class Stopped(Exception):
    """Training was asked to stop, and did so at a chunk boundary; `saved` says whether a checkpoint was written."""

    def __init__(self, step: int, steps: int, saved: bool) -> None:
        super().__init__(f"stopped after step {step} of {steps}{'' if saved else ', nothing saved'}")
        self.step, self.steps, self.saved = step, steps, saved
