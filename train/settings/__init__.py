"""Settings: the schema of a run, overrides from the command line,
and the errors that a user sees.
"""
