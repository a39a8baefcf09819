"""The demo: starts `pie-sglang serve` and asks it as a client does, by the `openai` package.

`questions.py` is its course, `server.py` the process that it starts, and `screen.py` shows answers
as they come. Run it with `pie-sglang demo`; no other package imports it.
"""
