"""Batches of requests: records, validation, runs, and their endpoints."""
