"""Questions to NVML: what a card is, holds and senses."""
