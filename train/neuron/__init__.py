"""Trainium's own parts of training: several NeuronCores, and compiling before the run.

sharding.py        data parallelism
reduction.py       one all-reduce for each flat bucket of gradients
compiling.py       what a run compiles, and going through every graph once
instructions.py    how many instructions our kernels put into a graph
"""
