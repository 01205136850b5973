"""The exceptions of the simulator. Whatever a kernel does wrong is a ConstraintError."""


class ConstraintError(AssertionError):
    """A kernel broke a rule of the instruction set;
    AWS's simulator raises an AssertionError of this name.
    """


class StrictError(ConstraintError):
    """A kernel broke a rule of the compiler or of the chip that AWS's simulator does not check."""


class NkiWarning(UserWarning):
    """A kernel does what a text of AWS refuses and kernels that ran on chips do."""


class NkiValidationError(Exception):
    """A kernel was launched on a configuration that the target does not have; the name is AWS's."""


def require(condition: object, message: str) -> None:
    """Raise ConstraintError with the message unless the condition holds."""
    if not condition:
        raise ConstraintError(message)
