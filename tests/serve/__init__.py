"""Tests that share one server: `pie-sglang serve` with our scheduler."""
