"""The I/O shell around `router.core`: relay, upstream connections, probes, metrics, logs, control plane."""
