"""The command `pie-sglang`.

Each command is a module with a function `main(arguments) -> int`: `doctor`, `check`, `plan`,
`models`, `tune`, `warm`, `serve`, `generate`, `batch`, `shell`, `bench`, `replay`, and `demo` in a
package of its own.
`main.py` runs them. The other modules:

===================  ===============================================================================
``machine``          queries the machine, for `doctor`
``pie_config``       the configuration of the Pie server, for `check`
``model_sizes``      model sizes from `config.json`, for `plan`
``engine_options``   the flags of an engine, and its start
``conversation``     chat messages and branches, for `shell`
``bench_server``     runs `sglang.bench_serving`, for `bench`
``bench_start``      the time from a server's start to its first token, for `bench`
``models``           converted models in the cache, for `models`
``one_batch``        latencies of single batches, for `bench`
``workloads``        synthetic requests, for `bench`
``serve_arguments``  flags of a command line and of a file, for `serve`, `batch` and `plan`
``serve_checks``     checks before anything is loaded, for `serve`
``report``           output of findings and files
``vllm``             the command `pie-vllm`, for those who come from `vllm serve`
``vllm_numbers``     numbers of its flags, which may have a unit
``version``          version and commit of the build
===================  ===============================================================================

Neither torch nor SGLang is imported here; `tune` imports torch when it begins to search, and `warm`
when it has something to compile.
"""
