"""One model on several devices: its processes, and an engine that runs on all of them at once."""
