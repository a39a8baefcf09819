"""Tests that share one `Engine`."""
