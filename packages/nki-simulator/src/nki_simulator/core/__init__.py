"""The machine that instructions run on. It imports nothing of the simulator outside this folder."""
