"""`python -m pie_driver_sglang.frontends.sglang_server`: the process of SGLang's HTTP server.

`pie-sglang serve` starts it, and cleans up after it.
"""

if __name__ == "__main__":
    import sys

    from pie_driver_sglang.frontends.sglang_server.server_process import run
    from pie_driver_sglang.shared_names import use_token

    use_token()
    raise SystemExit(run(sys.argv[1:]))
