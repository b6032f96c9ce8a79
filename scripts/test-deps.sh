#!/bin/sh
# Makes sure that the programs the tests talk to are installed. On Debian and as
# root it installs what is missing; otherwise it says what to install. With
# everything in place it takes a few milliseconds and prints nothing. Arguments
# name further programs that are packages of the same name.
set -eu

# has_postgres: the server, which Debian keeps out of PATH
has_postgres() { command -v postgres >/dev/null || ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1; }
has_chromium() { command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null; }

missing=
command -v git >/dev/null || missing="$missing git"
has_postgres || missing="$missing postgresql"
has_chromium || missing="$missing chromium"
for program in "$@"; do
	command -v "$program" >/dev/null || missing="$missing $program"
done
[ -n "$missing" ] || exit 0

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
	echo "The tests need:$missing" >&2
	echo "On Debian: sudo apt-get install -y --no-install-recommends$missing" >&2
	exit 1
fi

echo "installing for the tests:$missing" >&2
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# shellcheck disable=SC2086 # a list of words
if ! { apt-get update -q && apt-get install -q -y --no-install-recommends $missing; } </dev/null >"$log" 2>&1; then
	cat "$log" >&2
	echo "could not install:$missing" >&2
	exit 1
fi
