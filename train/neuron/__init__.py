"""Trainium's own parts of training: several NeuronCores, batches sent ahead, and compiling before the run.

sharding.py        replicas, heads and ZeRO-1, by AWS's neuronx_distributed
reduction.py       one all-reduce for each flat bucket of gradients
feed.py            batches sent to the device ahead of their step
compiling.py       what a run compiles, and going through every graph once
instructions.py    how many instructions our kernels put into a graph
"""
