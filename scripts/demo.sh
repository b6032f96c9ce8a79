#!/bin/sh
# Starts a server with a runner, submits examples/hello, shows what happened and
# ends everything that it started. Uses ./forgeci (`make build`), a temporary
# directory and a free port of the loopback interface; nothing stays behind.
set -eu
cd "$(dirname "$0")/.."
forgeci=$PWD/forgeci
work=$(mktemp -d)
server=
FORGECI_DEMO=$work # in the environment of everything that is started below
export FORGECI_DEMO

# survivors: processes that carry this demo's mark. This shell got none, since
# the mark was set after it had started.
survivors() {
	for environ in /proc/[0-9]*/environ; do
		if { tr '\0' '\n' <"$environ"; } 2>/dev/null | grep -qx "FORGECI_DEMO=$work"; then
			echo "$environ" | tr -dc '0-9\n'
		fi
	done
}

finish() {
	status=$?
	trap - EXIT INT TERM
	if [ -n "$server" ]; then
		kill "$server" 2>/dev/null || true
		tries=0
		while kill -0 "$server" 2>/dev/null && [ $tries -lt 150 ]; do
			sleep 0.1
			tries=$((tries + 1))
		done
		kill -9 "$server" 2>/dev/null || true
		wait "$server" 2>/dev/null || true
	fi
	left=$(survivors)
	if [ -n "$left" ]; then
		echo "left over: $left" >&2
		# shellcheck disable=SC2086 # a list of numbers
		kill -9 $left 2>/dev/null || true
		status=1
	fi
	if [ $status != 0 ] && [ -f "$work/server.log" ]; then
		echo "--- server log" >&2
		tail -n 40 "$work/server.log" >&2
	fi
	rm -rf "$work"
	[ $status != 0 ] || echo "Done. The server and its runner have ended, no process is left."
	exit $status
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
[ -t 1 ] || say() { printf '\n== %s\n' "$*"; }

# start picks a port and starts the server; another program may hold the port,
# so it is tried a few times.
start() {
	for _ in 1 2 3 4 5; do
		port=$((20000 + $(od -An -N2 -tu2 /dev/urandom) % 12000))
		FORGECI_SERVER=http://127.0.0.1:$port
		"$forgeci" server --data "$work/data" --listen "127.0.0.1:$port" --runner >"$work/server.log" 2>&1 </dev/null &
		server=$!
		tries=0
		while [ $tries -lt 300 ] && kill -0 "$server" 2>/dev/null; do
			if [ -s "$work/data/admin.token" ]; then
				FORGECI_TOKEN=$(cat "$work/data/admin.token")
				export FORGECI_SERVER FORGECI_TOKEN
				if "$forgeci" runs --output json >/dev/null 2>&1; then return 0; fi
			fi
			sleep 0.1
			tries=$((tries + 1))
		done
		kill -0 "$server" 2>/dev/null && break
	done
	echo "the server did not start" >&2
	return 1
}

say "Starting a server with an embedded database and one runner"
start
echo "It listens on $FORGECI_SERVER; its data is in $work/data."

say "Submitting a checkout: compile in one job, test what it built in another"
cp -R examples/hello "$work/hello"
run=$("$forgeci" submit --wait "$work/hello")
echo "Run $run has finished."

say "The run"
"$forgeci" show "$run"

for job in $("$forgeci" show "$run" --output json | grep -o '"job_[0-9a-z]\{26\}"' | tr -d '"' | awk '!seen[$0]++'); do
	say "Log of $job"
	"$forgeci" logs "$job"
done

say "Its artifacts"
"$forgeci" artifacts "$run"
echo
