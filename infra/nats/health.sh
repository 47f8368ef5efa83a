#!/bin/sh
# The health check of the NATS container: healthy while every stream takes writes.
#
#     health.sh http://127.0.0.1:8222 PID STORE
#
# A stream whose write failed (a full disk) takes no more, even with room again, until the server is
# started anew. So once the disk of STORE has room for two blocks of a stream, this ends the server
# in order, and compose starts it again. Nothing that it has confirmed is lost. One of several
# SERVERS is not ended: it says the same of a stream that catches up with the others.
monitor=$1 pid=$2 store=$3
asks() { wget -q -T 3 -O /dev/null "$monitor$1"; }

asks /healthz && exit 0
free_kb=$(df -Pk "$store" | awk 'NR == 2 { print $4 }')
if [ "${SERVERS:-1}" = 1 ] && asks "/healthz?js-server-only=true" && [ "$free_kb" -ge 16384 ]; then
  kill "$pid"
fi
exit 1
