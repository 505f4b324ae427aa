"""Stand-ins for devices that are not there, held against what their makers document."""
