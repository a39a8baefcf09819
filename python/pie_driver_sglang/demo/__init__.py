"""The demo: spawns the driver as the Pie runtime does and plays the runtime's part.

Run it with `python -m pie_driver_sglang.demo`.
"""
