"""What is said of a driver and of a runtime while requests are served.

Rust counts (`_core.Server.counts`, `_core.Runtime`). Threads of their own read the counts, so that
the loop that serves needs no Python for it.

==================  ================================================================================
``reporter``        the thread of a driver; ``log_line`` is the line that it logs
``driver_metrics``  a driver's metrics, each defined once, and their export
``engine_metrics``  the metrics of runtimes, where no front end of SGLang's writes them
``active``          what serves a model, and why a faster part does not
``spans``           spans of requests for an OpenTelemetry collector
``backoff``         the time between attempts of what may fail for a while
``served_model``    the model that the metrics of a driver refer to
==================  ================================================================================
"""
