"""Compares the cost model with published measurements:
`python -m nki_kernels.simulator calibrate`.
"""
