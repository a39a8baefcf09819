"""The command `pie-sglang`: looks at a machine, checks configurations, plans memory.

Each command is a module with a function `main(arguments) -> int`: `doctor`, `check`, `plan`,
`generate`, `shell`, `bench`, `replay`, and `serve` and `demo` in packages of their own.
`main.py` finds and runs it. What they are made of:

==================  ================================================================================
``machine``         what a machine has, for `doctor`
``pie_config``      the file of the Pie server, for `check`
``model_sizes``     a model's sizes by its `config.json`, for `plan`
``engine_options``  the options of an engine, and its start
``conversation``    messages and branches, for `shell`
``bench_server``    a running server, measured by `sglang.bench_serving`, for `bench`
``workloads``       requests to measure with, for `bench`
``report``          findings, for people and for programs
``version``         which build this is
==================  ================================================================================

Neither torch nor SGLang is imported here.
"""
