"""`python -m pie_driver_sglang`: the driver process, as the Pie runtime starts it.

With a word instead of `--config` it is the command `pie-sglang`.
"""

# `python -m` puts the working directory, which is the runtime's, in front of all libraries: a
# `logging.py` there would be imported, and run. What is imported up to here is built into Python.
import os
import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        try:
            if sys.path[0] == os.getcwd():  # noqa: PTH109 - pathlib is not built in
                del sys.path[0]
        except OSError:
            # The working directory is gone, and Python has left it out.
            pass
    # For the interpreters that libraries start.
    os.environ["PYTHONSAFEPATH"] = "1"

    from pie_driver_sglang.interpreter import refusal

    if message := refusal(sys.version_info[:2], sys.executable):
        sys.stderr.write(message)
        raise SystemExit(1)

    if len(sys.argv) > 1 and (sys.argv[1][:1] != "-" or sys.argv[1] == "--version"):
        from pie_driver_sglang.cli.main import main as run_command

        raise SystemExit(run_command())

    from pie_driver_sglang.fork_server.client import run_in_fork

    if (status := run_in_fork("pie_driver_sglang", sys.argv[1:])) is not None:
        os._exit(status)

    import signal

    from pie_driver_sglang import _core

    # Before anything else, because the other imports take a while.
    guard = _core.ExitGuard()
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    from pie_driver_sglang.backends.sglang.library import LIBRARY
    from pie_driver_sglang.driver.startup import main

    # Not through the interpreter's end, where libraries may wait for other ranks.
    os._exit(main(LIBRARY, guard=guard))
