"""Trainium's own parts of training: AWS's way to divide a model, and compiling before the run.

sharding.py        ZeRO-1, by neuronx_distributed
reduction.py       data parallelism: one all-reduce for each flat bucket of gradients
compiling.py       what a run compiles, and going through every graph once
instructions.py    how many instructions our kernels put into a graph
"""
