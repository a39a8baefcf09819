"""The demo: spawns the driver as the Pie runtime does, and plays the runtime's part.

`program.py` is the command line, `runtime.py` the continuous batching, `driver.py` the spawned
process and its ring, and `display.py` and `live.py` what is shown. Run it with
`python -m pie_driver_sglang.demo`. The driver imports nothing of it.
"""
