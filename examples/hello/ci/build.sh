#!/bin/sh
# "Compiles" src/hello.in into target/hello.
set -eu
mkdir -p target
sed "s|@GREETING@|$(cat src/greeting.txt)|" src/hello.in >target/hello
chmod 755 target/hello
echo "built target/hello, $(wc -c <target/hello) bytes"
