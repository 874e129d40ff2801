"""Published claims about number formats, optimizers and training stability, as experiments with verdicts."""

__version__ = "0.1.0"
