"""Parity: a float64 judge, a baseline in plain PyTorch,
and the cases by which every backend is judged.
"""
