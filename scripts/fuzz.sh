#!/bin/sh
# Fuzzes every target of every package for the time given, one after another,
# and ends with an error at the first that finds something.
set -eu
cd "$(dirname "$0")/.."
time=${1:-10s}
go=${GO:-go}

count=0
for package in $("$go" list ./...); do
	for target in $("$go" test -list '^Fuzz' "$package" | grep '^Fuzz' || true); do
		echo "$package $target"
		"$go" test -run '^$' -fuzz "^$target\$" -fuzztime "$time" -fuzzminimizetime 20x "$package"
		count=$((count + 1))
	done
done
echo "$count targets, $time each"
