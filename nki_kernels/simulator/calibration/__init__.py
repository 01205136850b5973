"""Compares the cost model with published measurements: `python -m nki_kernels.simulator calibrate`.

measurements   published times, their sources, and which program runs the same instructions
programs       the published kernels, written again
compare        model against measurement
"""
