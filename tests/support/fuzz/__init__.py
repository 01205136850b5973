"""Random cases of every operation, drawn by hypothesis, and what each of them is checked for."""
