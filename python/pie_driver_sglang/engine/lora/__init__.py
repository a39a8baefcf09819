"""LoRA adapters.

`files` reads and checks PEFT folders, `loader` does it on a thread, `adapters` registers them with
the backend.
"""
