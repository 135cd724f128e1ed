"""Answers the rules' queries about a script's syntax tree."""
