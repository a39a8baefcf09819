"""Drivers, forked processes and scripts under test."""
