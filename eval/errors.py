"""What can go wrong with a measurement.

EvalError
├── BadUsage      what was asked for cannot be run as asked: arms, a suite, a file, a shape
├── NotMeasured   a run ended without the figures it was started for
└── NotWritten    a result cannot be written; what came before it is there
"""


class EvalError(Exception):
    """Base of every error of this package."""


class BadUsage(EvalError):
    """What was asked for cannot be run as asked: arms, a suite, a file, a shape."""


class NotMeasured(EvalError):
    """A run ended without the figures it was started for."""


class NotWritten(EvalError):
    """A result cannot be written; what came before it is there."""
