"""nki.isa: the instructions, a module for each kind;
the decorator of each says which engine runs it.
"""

# ruff: noqa: F401, F403 (a namespace: what its modules list in __all__ is part of nisa)

from delta_trn.nki_kernels.simulator.core.errors import NkiValidationError
from delta_trn.nki_kernels.simulator.core.instruction import Handle as NkiInstruction
from delta_trn.nki_kernels.simulator.core.machine import current
from delta_trn.nki_kernels.simulator.isa import enums as constants
from delta_trn.nki_kernels.simulator.isa.activation import *
from delta_trn.nki_kernels.simulator.isa.control import *
from delta_trn.nki_kernels.simulator.isa.dma import *
from delta_trn.nki_kernels.simulator.isa.elementwise import *
from delta_trn.nki_kernels.simulator.isa.enums import *
from delta_trn.nki_kernels.simulator.isa.enums import nc_version
from delta_trn.nki_kernels.simulator.isa.generate import *
from delta_trn.nki_kernels.simulator.isa.matmul import *
from delta_trn.nki_kernels.simulator.isa.reduction import *
from delta_trn.nki_kernels.simulator.isa.search import *


def get_nc_version() -> nc_version:
    """The generation that the running kernel is built for."""
    return nc_version(current().target.generation)


def get_nc_sub_version() -> int:
    """The revision of the silicon within its generation: the first."""
    return 0
