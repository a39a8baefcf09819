"""Servers under test, and clients of them."""
