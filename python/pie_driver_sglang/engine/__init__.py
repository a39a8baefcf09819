"""The engine core: what runs a model, whichever backend loaded it.

`executor` is the interface between the serving loop and what runs the model.
"""
