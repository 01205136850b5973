"""Trainium's own parts of training: several NeuronCores, batches sent ahead,
and compiling before the run.
"""
