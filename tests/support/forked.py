"""Processes that are forked from a test's own: what it imported need not be imported again."""

import os
import traceback
from collections.abc import Callable


def call_apart(*functions: Callable[[], object]) -> list[str]:
    """Calls functions at the same time, each in a process of its own; returns their results as text.

    An exception is returned as its traceback. The functions may not compute with PyTorch: threads
    that wait for work in this process are not there in a forked one.
    """
    children = []
    for function in functions:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                text = str(function())
            except BaseException:
                text = traceback.format_exc()
            os.write(writing, text.encode())
            os._exit(0)  # nothing of the test's own process is cleaned up here
        os.close(writing)
        children.append((child, reading))
    results = []
    for child, reading in children:
        with open(reading, encoding="utf-8") as file:
            results.append(file.read())
        os.waitpid(child, 0)
    return results
