"""Measurements: what the README and the page report is made here, by a command."""
