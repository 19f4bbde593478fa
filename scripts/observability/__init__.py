"""The dashboard in docs/observability, made from the catalogues of metrics."""
