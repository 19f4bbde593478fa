"""The queue of jobs: which jobs there are, which run where, and why the others wait."""
