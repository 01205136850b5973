"""Parity: a float64 judge, an honest baseline, and the cases on which every backend is held against both."""
