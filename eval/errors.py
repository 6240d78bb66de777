"""What can go wrong with a measurement.

EvalError
├── BadArms       the arms or the suite cannot be run as asked
└── NotMeasured   a run ended without the figures it was started for
"""


class EvalError(Exception):
    """Base of every error of this package."""


class BadArms(EvalError):
    """The arms or the suite cannot be run as asked."""


class NotMeasured(EvalError):
    """A run ended without the figures it was started for."""
