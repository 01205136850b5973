"""Learning rate by width: many short runs, the best rate of each width, and how far it moves.

question.py     what is asked: arms, axes, and the trials they make
runner.py       makes the trials in processes, several at a time; each is a run that resumes after a kill
results.py      sweep.jsonl: one line per finished trial
report.py       optima, transfer, table
comparison.py   arms beside one another
picture.py      loss above the best, against the rate
"""
