"""Draws what ranks do in the course of a step."""
