"""`python -m pie_driver_sglang.demo`."""

from pie_driver_sglang.cli.main import main

if __name__ == "__main__":
    import sys

    raise SystemExit(main(["demo", *sys.argv[1:]]))
