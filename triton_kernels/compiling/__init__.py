"""Compiling kernels where no GPU is: a driver that launches nothing, and Triton's cache filled by
many processes.
"""
