#!/bin/sh
# Shows that a bug of docs/bugs.md is found where it still was:
#
#   scripts/repro.sh [-at COMMIT] FIX COMMAND...
#
# Takes the tree of COMMIT (of FIX itself, if none is named), on which COMMAND must
# pass; takes back what FIX changed in the product, keeps the tests, and runs
# COMMAND again. FIX and COMMIT are the beginnings of commit subjects, or names that
# git knows. Ends with 0 when COMMAND fails now by what it found, with 1 when it
# finds nothing, with 2 when that could not be tried. Everything happens in a
# temporary worktree.
set -eu
cd "$(dirname "$0")/.."

# commit: the one commit with this name, or the last whose subject begins with it
commit() {
	git rev-parse --verify -q "$1^{commit}" && return
	found=$(git log --format='%H %s' | awk -v want="$1" 'index($0, want) == 42 { print $1; exit }')
	[ -n "$found" ] || { echo "there is no commit \"$1\"" >&2; exit 2; }
	echo "$found"
}

at=
if [ "${1-}" = -at ]; then
	at=$(commit "$2")
	shift 2
fi
[ $# -ge 2 ] || { sed -n '2,4p' "$0" >&2; exit 2; }
fix=$(commit "$1")
: "${at:=$fix}"
shift

tree=$(mktemp -d)
clean() {
	git worktree remove --force "$tree/tree" >/dev/null 2>&1 || true
	rm -rf "$tree"
	git worktree prune
}
trap clean EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# runs COMMAND in the worktree and keeps what it prints.
try() { (cd "$tree/tree" && "$@") >"$tree/out" 2>&1; }

git worktree add -q --detach "$tree/tree" "$at"
name=$(git log -1 --format=%s "$fix")
if ! try "$@"; then
	tail -n 40 "$tree/out" >&2
	echo "the command fails with \"$name\", too" >&2
	exit 2
fi
git diff --binary "$fix^" "$fix" -- . ':(exclude)*_test.go' ':(exclude)*.md' >"$tree/fix"
if ! (cd "$tree/tree" && git apply --3way -R "$tree/fix") >"$tree/out" 2>&1; then
	cat "$tree/out" >&2
	exit 2
fi
if try "$@"; then
	echo "NOT FOUND: the command passes without \"$name\"" >&2
	exit 1
fi
tail -n 40 "$tree/out" >&2
if grep -q '\[build failed\]\|\[setup failed\]' "$tree/out"; then
	echo "the tests do not compile without \"$name\"" >&2
	exit 2
fi
echo "found: the command passes with \"$name\" and fails without it" >&2
