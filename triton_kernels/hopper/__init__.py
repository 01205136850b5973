"""Kernels of the gated delta rule in Gluon for compute capability 9, in place of those in the
folder above.

Gluon is the language of Triton's compiler in which layouts are placed by hand. No interpreter runs
it, only a GPU, or here the emulator.
"""
