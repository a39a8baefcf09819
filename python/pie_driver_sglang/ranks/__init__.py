"""One model on several devices: a process for each rank, and one engine over all of them.

`parallel.py` starts the other ranks, and ends them together. `leader.py` wraps the engine of rank
0: each call is broadcast as a command (`commands.py`) before it runs, and `worker.py` is the
process that receives them. `types.py` has `Rank`, `RankExecutor` and what is sent of a pass.
"""
