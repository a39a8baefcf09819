"""`python -m pie_driver_sglang`: the driver process, as the Pie runtime starts it."""

import os
import signal

from pie_driver_sglang import _core

if __name__ == "__main__":
    # Before anything else, because the other imports take a while.
    guard = _core.ExitGuard()
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    from pie_driver_sglang.launch import main

    # Not by way of the interpreter's end, in which libraries may wait for other ranks.
    os._exit(main(guard=guard))
