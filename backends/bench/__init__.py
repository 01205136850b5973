"""Benchmarks: the cases that are timed, the peers beside them,
and the floor that a machine sets.
"""
