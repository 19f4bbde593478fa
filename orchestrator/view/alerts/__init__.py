"""What is wrong with a run, judged from frames and as rules of Prometheus."""
