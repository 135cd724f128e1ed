"""A run while it goes on: its page, its tables, its verdict, in a notebook and in a terminal."""
