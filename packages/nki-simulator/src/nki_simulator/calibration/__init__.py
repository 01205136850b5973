"""Compares the cost model with published measurements:
`nki-simulator calibrate`.
"""
