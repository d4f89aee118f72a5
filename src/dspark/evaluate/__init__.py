"""Measuring: benchmarks, calibration, profiles, reports."""
