"""Plans, starts, shows and ends the processes of a config on this machine."""
