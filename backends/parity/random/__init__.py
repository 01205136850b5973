"""Random cases: what is drawn, what it is held against, which properties hold, and the runner of many."""
