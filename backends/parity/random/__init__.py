"""Draws random cases, says what they are held against, checks their properties, and runs many of them."""
