#!/bin/bash
# Runs a command with CANN's variables: the entry point of the Ascend images.
set -e
for script in /usr/local/Ascend/ascend-toolkit/set_env.sh /usr/local/Ascend/nnal/atb/set_env.sh; do
    # shellcheck disable=SC1090
    [ ! -f "$script" ] || source "$script"
done
exec "$@"
