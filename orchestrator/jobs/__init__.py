"""A queue of jobs: what is to be done, what runs where, and why the rest waits."""
