"""Load client, engine model and simulated engine server, demo, results and plots."""
