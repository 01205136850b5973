"""Estimates on Hopper, without a GPU: machine code, run on a model of one SM;
`__main__` is the command.
"""
