"""The machine that instructions run on. It imports nothing of the simulator outside this folder.

machine   one run: instruction counter, trace, capacity, and the checks of operands
memory    storages, tensors and their views
dtypes    data types and rounding
targets   what differs between trn1, trn2 and trn3
cores     two physical cores as one logical core (LNC 2)
errors    ConstraintError, StrictError, NkiValidationError
"""
