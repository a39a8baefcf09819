"""Metrics, log lines and spans of drivers and runtimes.

Rust counts (`_core.Server.counts`, `_core.Runtime`); separate threads read the counts, so the
serving loop runs no Python for them.

==================  ================================================================================
``reporter``        the thread of a driver; ``log_line`` is the line that it logs
``driver_metrics``  a driver's metrics, each defined once, and their export
``batch_log``       SGLang's log lines `Prefill batch` and `Decode batch`, of a runtime
``engine_metrics``  the metrics of runtimes, where SGLang's frontend does not write them
``collector``       what both have in common
``active``          the active components, and why a faster one is not used
``profile_merge``   steps of the runtime and torch's profiles of its drivers, as one trace
``spans``           spans of requests for an OpenTelemetry collector
``start_spans``     the time line of a start: imports, weights, graphs, first answer
``backoff``         exponential backoff
``served_model``    the model that the metrics of a driver refer to
==================  ================================================================================
"""
