"""Mixture of experts in decode steps: `routing` and `experts`.

Routing chooses the experts of each row; the expert GEMMs read only the weights of chosen experts.
"""
