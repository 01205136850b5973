"""Stands for a GPU where none is: operations and models run their own code to the last launch."""
