#!/usr/bin/env bash
# One training run that goes on whatever ends it:  deploy/keep.sh runs/pong atari:pong --placement ray --actors 16
# The run's directory, then what goes to `qfleet train`. A death of the driver, or of all of Ray on this machine, is
# answered by `qfleet resume`; settings that are refused, an end, Ctrl-C and `qfleet stop` are not. Under systemd, or
# started by the machine's boot, it also survives the machine. A Ray that it starts has a new token each time.
set -u

run=$1
shift
child=
trap 'kill -INT "$child" 2>/dev/null' INT TERM # the run saves itself, and ends with 130

while true; do
  if [[ -f $run/config.yaml ]]; then
    qfleet resume "$run" & # without a checkpoint it begins anew
  else
    qfleet train "$@" --run-dir "$run" &
  fi
  child=$!
  wait "$child"
  code=$?
  while kill -0 "$child" 2>/dev/null; do # a signal ended the waiting, not the run
    wait "$child"
    code=$?
  done
  case $code in
    0 | 2 | 4 | 130) exit "$code" ;;
  esac
  echo "the run ended with $code; it goes on in a second" >&2
  sleep 1
done
