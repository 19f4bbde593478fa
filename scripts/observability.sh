#!/usr/bin/env bash
# Shows an alert in a real Prometheus: starts a rehearsal, its page and Prometheus, stops the head for a while as an overloaded
# machine would, waits until RecordsLate fires and is over again, and ends everything that it started.
#
#     scripts/observability.sh [--stay]      --stay: let it all run until Ctrl-C, to look around
set -euo pipefail
cd "$(dirname "$0")/.."
stay=${1:-}
python=${PYTHON:-.venv/bin/python}
command -v prometheus > /dev/null || { echo "observability: prometheus is not installed; on Debian: apt install prometheus" >&2; exit 2; }

work=$(mktemp -d)
pids=()
finish() {
  for pid in "${pids[@]}"; do kill -TERM "$pid" 2> /dev/null && kill -CONT "$pid" || true; done
  for pid in "${pids[@]}"; do wait "$pid" 2> /dev/null || true; done
  rm -rf "$work"
}
trap finish EXIT
trap 'exit 130' INT TERM

await() { # WHAT SECONDS COMMAND...
  local what=$1 seconds=$2
  shift 2
  for _ in $(seq "$seconds"); do
    if "$@" > /dev/null 2>&1; then return; fi
    sleep 1
  done
  echo "observability: no $what within $seconds s" >&2
  tail -n 20 "$work"/*.log >&2
  exit 1
}
free_port() { "$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
alerts() { # STATE: names of the alerts in this state, with their subjects
  curl -fsS "http://127.0.0.1:$port/api/v1/alerts" | "$python" -c '
import json, sys
for alert in json.load(sys.stdin)["data"]["alerts"]:
    labels = alert["labels"]
    if alert["state"] == sys.argv[1]:
        print(labels["alertname"], labels.get("subject", ""), "-", alert["annotations"]["summary"])
' "$1"
}

echo "A rehearsal begins; its output is in $work/run.log."
"$python" -m orchestrator run --rehearse --plain --duration 10 --set "run.dir=$work/runs" > "$work/run.log" 2>&1 &
pids+=($!)
await "run folder" 120 sh -c "ls $work/runs/*/run.sqlite"

web_port=$(free_port)
"$python" -m orchestrator web --run-dir "$work/runs" --port "$web_port" < /dev/null > "$work/web.log" 2>&1 &
pids+=($!)
await "page" 30 grep -q Programs "$work/web.log"
tokens=$(sed -n 's/^Programs send the text of .* in \(.*\) as Authorization.*/\1/p' "$work/web.log")

port=$(free_port)
sed -e "s|read.token|$tokens/read.token|" -e "s|:8470|:$web_port|" -e 's|: 15s|: 2s|' docs/observability/prometheus.yml > "$work/prometheus.yml"
sed -e 's|interval: 15s|interval: 2s|' docs/observability/alerts.yml > "$work/alerts.yml"
prometheus --config.file="$work/prometheus.yml" --storage.tsdb.path="$work/data" --web.listen-address="127.0.0.1:$port" \
  > "$work/prometheus.log" 2>&1 &
pids+=($!)
await "Prometheus" 60 curl -fsS "http://127.0.0.1:$port/-/ready"
await "scraped worker" 180 sh -c "curl -fsS 'http://127.0.0.1:$port/api/v1/query?query=orchestrator_slot_state' | grep -q pc1/0"
echo "Prometheus: http://127.0.0.1:$port/alerts. The page: http://127.0.0.1:$web_port"

head_pid=${pids[0]}
if [ "$stay" = --stay ]; then echo "Ctrl-C ends it."; while sleep 1; do :; done; fi
echo "The head of the run is stopped now."
kill -STOP "$head_pid"
fires() { alerts firing | grep -q RecordsLate; }
is_over() { ! fires; }
await "alert" 120 fires
alerts firing
kill -CONT "$head_pid"
await "end of the alert" 60 is_over
echo "The head works again, and the alert is over."
