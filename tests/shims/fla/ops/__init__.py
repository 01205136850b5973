"""Empty, as a package needs it."""
