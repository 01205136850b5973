"""python -m models: the muP table, as the README has it."""

from delta_trn.models.mup import markdown_table

print(markdown_table())
