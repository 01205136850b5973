"""Studies: coordinate checks, probes, sweeps, fits and throughput.
Only commands import this package.
"""
