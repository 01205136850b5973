"""The workshop: programs for who works on the project, not installed;
the product imports none of them.
"""
