"""Commands of the user: to the slots of a running run, and to the jobs of a queue."""
