"""The page: controls, runs and the live stage. It imports river_core and never touches tensors."""

import os

# Gradio and the hub client read these when they are imported, and this package is imported before them.
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
# A closed tab behind a proxy is noticed only at the next heartbeat, 15 s apart by default.
os.environ.setdefault("GRADIO_HEARTBEAT_INTERVAL", "5")
# Gradio summarises its latest events after every run; 500 of them are enough.
os.environ.setdefault("GRADIO_ANALYTICS_MAX_EVENTS", "500")
os.environ.setdefault("GRADIO_ANALYTICS_CACHE_FREQUENCY", "50")
