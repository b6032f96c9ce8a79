#!/bin/sh
# Checks what the program says.
set -eu
got=$("./$1" ForgeCI)
want="Hello, ForgeCI!"
if [ "$got" != "$want" ]; then
	echo "it says \"$got\", want \"$want\""
	exit 1
fi
echo "it says \"$got\""
