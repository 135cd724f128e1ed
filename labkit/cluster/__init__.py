"""Beyond one machine: launch files for those who schedule jobs, and what becomes of the jobs."""
