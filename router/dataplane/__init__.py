"""The I/O shell around `router.core`: relay, connections, probes, metrics, logs, control plane."""
