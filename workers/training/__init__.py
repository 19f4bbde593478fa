"""Trains a model whose memory moves under it. Loads torch; knows neither the engine nor Ray."""
