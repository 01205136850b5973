"""Learning rate by width: many short runs, the best rate of each width, and how far it moves.

definition.py   what is asked: axes, arms, and the trials they make
trial.py        one trial is one run in a folder of its own, so a killed one goes on from its checkpoint
results.py      sweep.jsonl: a line a finished trial
scheduler.py    trials side by side in processes; several schedulers share a folder
report.py       optima, transfer, table;   picture.py   loss above the best, against the rate
"""
