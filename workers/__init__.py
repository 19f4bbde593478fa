"""The engine: torch and the card. Never imports ray or orchestrator."""
