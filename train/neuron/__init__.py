"""Compile before the run what the run would compile, and write down that it is done.

graphs.py       what a run compiles: names, shapes
identity.py     what decides whether two runs compile the same: keys, sources, versions, processes
manifest.py     the file beside the cache that has one entry an identity
compiling.py    goes through every graph once
notice.py       the line before a run that says whether it was warmed
"""
