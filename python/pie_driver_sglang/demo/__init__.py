"""The demo: spawns the driver as the Pie runtime does, and plays the runtime's part.

`program.py` is the command line, `runtime.py` the continuous batching, `driver.py` the spawned
process and its ring, and `tokens.py` the tokenizer. What is shown is in `display.py`, `live.py` (on
a terminal; `screen.py` chooses) and `report.py`. Run it with `python -m pie_driver_sglang.demo`.
The driver imports nothing of it.
"""
