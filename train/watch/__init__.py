"""Watching a run: metrics, trackers, progress, the summary and the loss plot."""
