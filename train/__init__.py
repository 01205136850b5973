"""Training: configuration, data, loop, checkpoints and the command line.
Nothing is imported here.
"""
