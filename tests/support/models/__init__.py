"""Test models and what they must compute."""
