"""The configuration: the launcher's TOML, the options, and a model's own `config.json`.

`file.py` reads and checks the whole file and gives a `DriverConfig`. `options.py` defines every
option once, and `option_checks.py` checks a table of them. `hf_config.py` and `arch.py` read the
model's `config.json`, and `thinking.py` knows how models end their thinking. `server_args.py` is
generated: the fields of SGLang's `ServerArgs`, and `flag_names.py` has the names of their flags.
`edge.py` has the limits of the HTTP frontends, and `keys.py` their API keys. `types.py` has what
other packages use. Whatever is wrong raises a `ConfigError` within a second, since neither torch
nor SGLang is imported.
"""
