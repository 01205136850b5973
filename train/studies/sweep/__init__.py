"""Learning rate by width: many short runs, the best rate of each width, and how far it moves."""
