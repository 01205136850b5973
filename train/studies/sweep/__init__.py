"""Learning rate by width: many short runs, the best rate of each width, and how far it moves.

grid.py         what is asked: a grid of runs, from key=value
runner.py       makes the runs in processes, several at a time; each resumes after a kill
results.py      sweep.jsonl: one line per finished run
report.py       curves, what flank and wall do, one table; sides.py fits their drifts
picture.py      writes the table and the picture: loss above the best, against the rate
"""
