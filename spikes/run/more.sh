#!/bin/bash
# Toolchains and odd uses in a directory: more.sh DIRECTORY, below draconis-run. The spike fails for
# fifos, setuid programs and sockets, and `tail -f` polls.
w=$1 out=$(mktemp) q=$(mktemp -u)
cd "$w" || exit 1
t() { l=$1; shift; if "$@" >$out 2>&1; then echo "ok  $l"; else echo "BAD $l: $(tail -c 200 $out | tr '\n' ' ')"; fi; }
export HOME=/root; mkdir home
t "cargo new" cargo new --vcs none hello
t "cargo build" env CARGO_TARGET_DIR=$w/hello/target cargo build --offline --manifest-path hello/Cargo.toml
t "rust program" ./hello/target/debug/hello
mkdir gop; printf 'package main\nimport ("fmt";"os")\nfunc main(){ e,_:=os.Executable(); d,_:=os.Getwd(); fmt.Println(e,d) }\n' > gop/main.go; (cd gop; go mod init gop >/dev/null 2>&1)
t "go build" env GOCACHE=$w/gocache GOFLAGS=-mod=mod go build -C gop -o ../goprog .
t "go program" ./goprog; cat $out
printf 'int f(void){return 7;}' > l.c; gcc -shared -fPIC -o libl.so l.c; printf '#include <stdio.h>\nint f(void);int main(){printf("%%d\\n",f());return 0;}' > m.c; gcc -o m m.c -L. -ll -Wl,-rpath,'$ORIGIN'
t "shared library beside the program" ./m
printf '#!%s/sh2\necho hi\n' "$w" > sc; cp /bin/sh sh2; chmod +x sc; t "interpreter on the volume" ./sc
t "python venv" python3 -m venv --without-pip venv
t "python of the venv" venv/bin/python -c 'import sys; print(sys.prefix)'; cat $out
t "vi ex" ex -s -c 'a|hello' -c 'wq' exfile
t "zip/gzip" sh -c 'gzip -k l.c && gunzip -c l.c.gz | cmp - l.c'
t "dd sparse" sh -c 'truncate -s 100M sp; dd if=/dev/urandom of=sp bs=4k count=1 seek=5000 conv=notrunc; cp --sparse=always sp sp2; cmp sp sp2'
t "dpkg-deb" dpkg-deb --help
t "flock(1)" flock lockf true; t "mkfifo" sh -c 'mkfifo ff; (echo x > ff &) ; timeout 2 cat ff'
t "unix socket" python3 -c "import socket; s=socket.socket(socket.AF_UNIX); s.bind('sock')"; ls -l sock
t "mkstemp O_TMPFILE" python3 -c "import tempfile; f=tempfile.TemporaryFile(dir='.'); f.write(b'x')"
t "make -j in subdirs" sh -c 'mkdir -p s/t; printf "all:\n\t\$(MAKE) -C t\n" > s/Makefile; printf "all:\n\techo x > y\n" > s/t/Makefile; make -C s'
t "sudo-ish setuid" sh -c 'cp /bin/true st; chmod u+s st; ./st'
t "chroot" chroot . /goprog
t "tail -f" timeout 1 tail -f l.c
t "mv across" sh -c "echo x >$q; mv $q here; mv here $q; cat $q"
t "find -exec" find . -maxdepth 1 -name '*.c' -exec wc -c {} +
t "bash cd -P .. links" bash -c 'mkdir -p a/b; ln -s a/b lb; cd lb; cd ..; test -e lb'
t "realpath" realpath lib.so l.c
