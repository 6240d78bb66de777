"""Measures. Never imported by the service."""
