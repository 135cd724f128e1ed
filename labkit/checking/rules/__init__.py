"""The rules, by what goes wrong. A module registers its rules when it is imported."""
