"""Provides what single labs need besides `Lesson`: one module for each subject."""
