"""Trainium's own parts of training: AWS's way to divide a model, and compiling before the run.

sharding.py     tensor parallelism by heads and ZeRO-1, by neuronx_distributed
reduction.py    data parallelism: one all-reduce for each flat bucket of gradients
feed.py         batches sent to the device ahead of their step
graphs.py       what a run compiles: names, shapes
compiling.py    goes through every graph once
record.py       writes down that it is done; the line before a run that says whether it was
"""
