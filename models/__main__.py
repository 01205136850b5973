"""Prints the muP table as docs/mup.md shows it: python -m delta_trn.models."""

from delta_trn.models.mup import markdown_table

print(markdown_table())
