"""What a driver says while it serves: a line of figures now and then, and Prometheus metrics.

Rust counts (`_core.Server.counts`); a thread of its own reads the counts, so that the loop that
serves needs no Python for it.
"""
