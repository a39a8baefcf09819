"""`python -m pie_driver_sglang`: the driver process, as the Pie runtime starts it."""

from pie_driver_sglang.launch import main

if __name__ == "__main__":
    raise SystemExit(main())
