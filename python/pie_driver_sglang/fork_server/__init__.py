"""A fork server: a process that has imported SGLang and forks drivers, which start without imports.

A frontend starts it (`starter.py`), and it imports while the frontend does (`server.py`), without
initializing CUDA (`cuda_properties.py`). `python -m pie_driver_sglang` asks it for a fork, and then
stands for that fork until it ends (`client.py`). Where there is no fork server, or it cannot serve,
the process becomes the driver itself.
"""
