"""Submits a run to Kubernetes: its plan as values of the Helm chart in `chart/`."""
