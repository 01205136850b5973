"""Coordinate checks: how the size of every tensor's update changes with width."""
