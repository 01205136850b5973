"""What the simulator raises. Everything a kernel does wrong is a ConstraintError.

ConstraintError   AWS's simulator raises it too (an AssertionError there and here)
StrictError       a rule of the hardware or the compiler that AWS's simulator lets pass
NkiValidationError   launch errors (LNC); the name is AWS's
"""


class ConstraintError(AssertionError):
    """A kernel broke a rule of the instruction set."""


class StrictError(ConstraintError):
    """A kernel broke a rule that only the compiler or the chip would have caught."""


class NkiValidationError(Exception):
    """A kernel was launched on a configuration that the target does not have."""


def require(condition: object, message: str) -> None:
    if not condition:
        raise ConstraintError(message)
