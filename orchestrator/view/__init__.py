"""What people see of a run: tables, pages, alerts, notices. Never imports what makes a run."""
