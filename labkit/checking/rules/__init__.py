"""The rules, grouped by kind of mistake. A module registers its rules when it is imported."""
