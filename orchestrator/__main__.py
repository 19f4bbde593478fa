"""`python -m orchestrator`."""

from orchestrator.entry import main

main()
