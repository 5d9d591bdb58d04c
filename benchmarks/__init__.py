"""megapipe against its peers and against its own plans: one command per table, `python -m benchmarks.NAME`."""
