"""One module a command, each with `main(arguments) -> int`,
imported when its command is asked for.
"""
