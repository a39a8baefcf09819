"""Hostile requests, the clients that send them, and the soak test."""
