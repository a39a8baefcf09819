"""Tensor parallelism: a process for each rank, and one executor over all of them.

`parallel.py` starts the worker ranks, and ends them together. `leader.py` wraps the executor of
rank 0: each call is broadcast as a command (`commands.py`, with `RankExecutor`) before it runs, and
`worker.py` is the process that receives them. `types.py` has `Rank` and what is sent of a pass.
"""
