"""Makes docs/observability from the catalogues of metrics and alerts, and made-up runs that try the
alerts.
"""
