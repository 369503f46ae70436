#!/bin/bash
# Programs in a directory: programs.sh DIRECTORY MATERIAL; prints seconds, and what was wrong.
# Run as it is on a mounted volume, and below draconis-run.
w=$1 m=$2
timed() {
    local label=$1 from=$EPOCHREALTIME
    shift
    "$@" >"$m/out" 2>&1 || { echo "FAILED $label: $(tail -c 300 "$m/out" | tr '\n' ' ')"; return; }
    local to=$EPOCHREALTIME
    echo "$label $(((${to/./} - ${from/./}) / 1000))"
}
same() { diff -r "$2" "$3" >"$m/out" 2>&1 || echo "FAILED $1: $(head -c 300 "$m/out" | tr '\n' ' ')"; }
listing() { (cd "$1" && find . -printf '%p %y %m %U %G %s %T@ %l\n' | grep -v '^\. ' | awk '$2 == "d" { $6 = 0 } 1' | LC_ALL=C sort); }
timed tar_x tar -C "$w" -xf "$m/src.tar"
timed ls_lR ls -lR "$w/src"
timed find find "$w/src" -name '*.go' -size +8k -newermt 2001-01-01
timed cp_a cp -a "$w/src" "$w/copy"
same "tree of tar x" "$m/src" "$w/src"
same "tree of cp -a" "$m/src" "$w/copy"
listing "$m/src" >"$m/want"; listing "$w/src" >"$m/got"
cmp "$m/want" "$m/got" || { echo "FAILED attributes of tar x"; diff "$m/want" "$m/got" 2>&1 | head -5; }
listing "$w/copy" >"$m/got"
cmp "$m/want" "$m/got" || { echo "FAILED attributes of cp -a"; diff "$m/want" "$m/got" 2>&1 | head -5; }
timed rm_rf rm -rf "$w/copy"
timed git_clone git clone -q "$m/repo.git" "$w/g"
timed git_clone_here git clone -q "$w/g" "$w/g2"
timed git_status git -C "$w/g2" status --porcelain
timed git_fsck git -C "$w/g" fsck --full
git -C "$w/g2" diff --quiet HEAD || echo "FAILED clones"; diff -r -x .git "$m/plain" "$w/g2" >"$m/out" 2>&1 || echo "FAILED clones: $(head -c 300 "$m/out")"
timed git_commit sh -c "cd $w/g && git config user.email a@b && git config user.name n && echo x >new && git add -A && git commit -qm x && git gc -q && git log --oneline | head -1"
cp -r "$m/c" "$w/c"
timed make_cc make -s -j2 -C "$w/c"
[ "$(cd "$w/c" && ./program)" = "$(cat "$m/c.want")" ] || echo "FAILED program built on the volume"
cp "$m/walk" "$w/walk"
timed static_go "$w/walk" "$w/src/net" "$w/walked"
[ "$(cat "$m/out")" = "$(cat "$m/walk.want")" ] || echo "FAILED static program: $(cat "$m/out")"
same "tree of the static program" "$m/src/net" "$w/walked"
timed python python3 -c "
import os, sqlite3, mmap
d = '$w/py'; os.mkdir(d); os.chdir(d)
assert os.getcwd() == d
db = sqlite3.connect('x.db'); db.execute('create table t (a, b)')
for i in range(2000): db.execute('insert into t values (?, ?)', (i, 'x' * 100))
db.commit(); assert db.execute('select count(*) from t').fetchone() == (2000,); db.close()
with open('m', 'wb') as f: f.write(b'a' * 10000)
with open('m', 'r+b') as f:
    m = mmap.mmap(f.fileno(), 0); m[5000:5003] = b'xyz'; m.flush(); m.close()
assert open('m', 'rb').read()[4999:5004] == b'axyza'
f = open('u', 'w+'); f.write('kept'); f.flush(); os.unlink('u'); f.seek(0); assert f.read() == 'kept'
a = open('app', 'a'); b = open('app', 'a'); a.write('1'); a.flush(); b.write('2'); b.flush()
assert open('app').read() == '12'
if os.fork() == 0:
    a.write('3'); a.flush(); os._exit(0)
os.wait(); assert open('app').read() == '123'
os.truncate('app', 1); assert os.stat('app').st_size == 1 and open('app').read() == '1'
os.rename('app', 'app2'); assert sorted(os.listdir('.')) == ['app2', 'm', 'x.db']
"
