"""The exceptions of the simulator. Whatever a kernel does wrong is a ConstraintError.

ConstraintError      AWS's simulator raises it too, there as here a subclass of AssertionError
StrictError          breaks a rule of the hardware or of the compiler that AWS's simulator does not check
NkiValidationError   asks for a launch that the target does not have; the name is AWS's
NkiWarning           is not raised but warned of: AWS's text refuses it, and AWS's kernels or others do it
"""


class ConstraintError(AssertionError):
    """A kernel broke a rule of the instruction set."""


class StrictError(ConstraintError):
    """A kernel broke a rule that only the compiler or the chip would have caught."""


class NkiWarning(UserWarning):
    """A kernel does what a text of AWS refuses and kernels that ran on chips do."""


class NkiValidationError(Exception):
    """A kernel was launched on a configuration that the target does not have."""


def require(condition: object, message: str) -> None:
    """Raise ConstraintError with the message unless the condition holds."""
    if not condition:
        raise ConstraintError(message)
