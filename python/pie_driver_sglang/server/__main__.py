"""`python -m pie_driver_sglang.server`: the process of SGLang's HTTP server.

`pie-sglang serve` starts it, and cleans up after it. Processes that it starts afresh import this
module, so nothing is imported here.
"""

if __name__ == "__main__":
    import sys

    from pie_driver_sglang.server.launch import run

    raise SystemExit(run(sys.argv[1:]))
