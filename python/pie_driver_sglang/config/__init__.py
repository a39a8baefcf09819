"""The configuration: the launcher's TOML, the options, and a model's own `config.json`.

`config_file.py` reads and checks the launcher's file and returns a `DriverConfig`
(`driver_config.py`). `options.py` defines every option once, and `option_checks.py` validates a
table of them. `vllm_options.py`, `vllm_models.py` and the generated `engine_args.py`
are the same for vLLM. `hf_config.py` and `arch.py` read the model's `config.json`,
`draft_head.py` that of an EAGLE head,
`model_features.py` has what models need and the driver lacks, `weight_formats.py` which formats of
weights cannot be loaded, and
`reasoning_parsers.py` has the tokens that end a model's reasoning. `sglang_versions.py` has the
supported versions of SGLang, and `server_args.py` the fields of the installed version's
`ServerArgs` (`server_arg.py`), from the generated `server_args_v0517.py` and
`server_args_v0523.py`;
`flag_names.py` has the names of their flags, and
`no_effect.py` the flags that change nothing here, each with the reason.
`http_limits.py` has the limits of the HTTP frontends, and `api_keys.py` their keys.
`switches.py` reads environment variables that are 0 or 1, `installed.py` versions of packages.
Errors are `ConfigError`s, raised within a second, since neither torch nor SGLang is imported.
"""
