"""python -m models: the muP table, as the README has it."""

from models.mup import markdown_table

print(markdown_table())
