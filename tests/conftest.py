"""Tests of the Python package; ``ranks.py`` beside this runs the worlds."""
