"""`python -m pie_driver_sglang.demo`."""

from pie_driver_sglang.demo.program import main

if __name__ == "__main__":
    raise SystemExit(main())
