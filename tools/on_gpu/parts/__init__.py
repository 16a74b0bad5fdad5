"""The parts: each module has a function ``run``, which gets the rows to report to, and the folder of the bundle."""
