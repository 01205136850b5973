"""nki.isa: the instructions, a module for each kind;
the decorator of each says which engine runs it.
"""

# ruff: noqa: F401, F403 (a namespace: what its modules list in __all__ is part of nisa)

from nki_simulator.core.errors import NkiValidationError
from nki_simulator.core.instruction import Handle as NkiInstruction
from nki_simulator.core.machine import current
from nki_simulator.isa import enums as constants
from nki_simulator.isa.activation import *
from nki_simulator.isa.control import *
from nki_simulator.isa.dma import *
from nki_simulator.isa.elementwise import *
from nki_simulator.isa.enums import *
from nki_simulator.isa.enums import nc_version
from nki_simulator.isa.generate import *
from nki_simulator.isa.matmul import *
from nki_simulator.isa.reduction import *
from nki_simulator.isa.search import *


def get_nc_version() -> nc_version:
    """The generation that the running kernel is built for."""
    return nc_version(current().target.generation)


def get_nc_sub_version() -> int:
    """The revision of the silicon within its generation: the first."""
    return 0
