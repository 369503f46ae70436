#!/bin/bash
# Measures the kernel's ext4, a FUSE mount and the spike beside each other, on new images.
#   bench.sh SPIKE DRACONIS WORK_DIRECTORY ROUNDS_OF_LOOPS ROUNDS_OF_PROGRAMS
# WORK_DIRECTORY gets material (10,000 files of Go's sources, a repository, a generated C project).
set -u
here=$(cd "$(dirname "$0")" && pwd)
spike=$1 draconis=$2 w=$3 m=$3/material
nice="nice -n -20"
mkdir -p "$w"/{kernel,mount,spike} "$m"
gcc -O2 -o "$m/loops" "$here/loops.c" || exit 1
if [ ! -e "$m/ready" ]; then
    cp -r /usr/local/go/src "$m/src" && tar --format=posix -C "$m" -cf "$m/src.tar" src || exit 1
    (cd "$here" && CGO_ENABLED=0 go build -o "$m/walk" walk.go) && "$m/walk" "$m/src/net" "$m/walked" >"$m/walk.want" || exit 1
    git clone -q --bare "$here/../.." "$m/repo.git" && git clone -q "$m/repo.git" "$m/plain" || exit 1
    mkdir "$m/c"
    for i in $(seq 0 79); do
        echo "int f$i(int x);" >"$m/c/f$i.h"
        { echo '#include <stdio.h>'; echo '#include <stdlib.h>'; echo '#include <string.h>'
          for j in $(seq 0 10 "$i"); do echo "#include \"f$j.h\""; done; echo "#include \"f$i.h\""
          echo "int f$i(int x) { char b[64]; snprintf(b, sizeof b, \"%d\", x + $i); return atoi(b) % 1000; }"
        } >"$m/c/f$i.c"
    done
    { for i in $(seq 0 79); do echo "#include \"f$i.h\""; done; echo '#include <stdio.h>'
      echo 'int main(void) { int x = 1;'; for i in $(seq 0 79); do echo "x = f$i(x);"; done; echo 'printf("%d\n", x); return 0; }'
    } >"$m/c/main.c"
    printf 'objects := $(patsubst %%.c,%%.o,$(filter-out main.c,$(wildcard *.c)))\nprogram: main.o all.a\n\tgcc -o $@ $^\nall.a: $(objects)\n\tar rcs $@ $^\n%%.o: %%.c\n\tgcc -O1 -MMD -c -o $@ $<\n' >"$m/c/Makefile"
    cp -r "$m/c" "$m/cbuilt" && make -s -C "$m/cbuilt" && "$m/cbuilt/program" >"$m/c.want" || exit 1
    touch "$m/ready"
fi
image() { rm -f "$w/image"; truncate -s 4G "$w/image"; mke2fs -qF -t ext4 -E lazy_itable_init=0,lazy_journal_init=0 "$w/image"; }
judge() { e2fsck -fn "$w/image" >"$w/fsck" 2>&1 || { echo "FAILED e2fsck after $1"; cat "$w/fsck"; }; }
on() {
    local which=$1
    shift
    if [ "$1" = keep ]; then shift; else image; fi
    case $which in
    kernel) mount -o loop "$w/image" "$w/kernel" && $nice "$@" "$w/kernel" 2>&1 | sed "s/^/$which /"; umount "$w/kernel" ;;
    mount) $nice "$draconis" mount "$w/image" "$w/mount" && $nice "$@" "$w/mount" 2>&1 | sed "s/^/$which /"; "$draconis" umount "$w/mount" ;;
    spike) $nice "$spike" -w --statistics "$w/image" --at "$w/spike" -- "$@" "$w/spike" 2>&1 | sed "s/^/$which /" ;;
    esac
    judge "$which"
}
loops() { "$m/loops" "$1" 20000 256; }
prepare() { "$m/loops" "$1" 20000 -1; }
look() { "$m/loops" "$1" 20000 0; }
programs() { "$here/programs.sh" "$1" "$m"; }
export -f loops prepare look programs
export here m
for round in $(seq "$4"); do
    for which in kernel mount spike; do on $which bash -c 'loops "$0"'; done
    on kernel bash -c 'prepare "$0"' >/dev/null
    for which in kernel mount spike; do on $which keep bash -c 'look "$0"'; done
    echo "load: $(cat /proc/loadavg)"
done
for round in $(seq "$5"); do
    for which in kernel mount spike; do on $which bash -c 'programs "$0"'; done
    echo "load: $(cat /proc/loadavg)"
done
