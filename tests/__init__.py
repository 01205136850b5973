"""Tests of delta-trn. Plain `pytest` runs them from the repository root."""
