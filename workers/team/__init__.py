"""One training shared by two to four slots: each computes its own rows of each step."""
