"""Shows runs to people: tables, pages, alerts, messages. Never imports the code that runs them."""
