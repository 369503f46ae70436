//! Common programs that check themselves: databases, archives, builds.

use std::fmt::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use draconis_device::Random;

use crate::common::volume::{Volume, run, shell};
use crate::common::{fuse, have, odd_tree, skipped};
use crate::{long, seeds};

/// Returns true if a test can run; otherwise reports what is missing.
pub fn can(test: &str, programs: &[&str]) -> bool {
    let missing: Vec<_> = programs.iter().filter(|program| !have(program)).collect();
    if !missing.is_empty() {
        skipped(format_args!("{test} needs {missing:?}"));
    }
    missing.is_empty() && fuse(test)
}

/// Runs a shell script; returns its output.
pub fn said(script: &str, at: &Path) -> String {
    let output = Command::new("sh").args(["-euc", script]).current_dir(at).output().unwrap();
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{script}: {complaint}");
    String::from_utf8(output.stdout).unwrap()
}

/// Returns a database workload, determined by the seed.
fn statements(random: &mut Random, journal: &str) -> String {
    let mut sql = format!(
        "pragma journal_mode={journal}; pragma page_size=1024; pragma cache_size=20;
         create table t (k integer primary key, v blob); create index i on t (v);\n"
    );
    for _ in 0..60 {
        sql.push_str("begin;\n");
        for _ in 0..random.below(40) {
            let (key, len) = (random.below(400), random.below(900));
            let _ = match random.below(4) {
                0 => writeln!(sql, "delete from t where k % 17 = {};", key % 17),
                1 => writeln!(sql, "update t set v = zeroblob({len}) where k < {};", key / 20),
                _ => writeln!(sql, "replace into t values ({key}, printf('%.{len}c', 'v{key}'));"),
            };
        }
        sql.push_str(["commit;\n", "commit;\n", "rollback;\n"][random.below(3) as usize]);
        if random.below(20) == 0 {
            sql.push_str("vacuum;\n");
        }
    }
    sql
}

#[test]
fn a_database_keeps_its_integrity() {
    if !can("loading a database", &["sqlite3"]) {
        return;
    }
    for seed in seeds() {
        for (journal, options) in [
            ("delete", "rw,noatime,nowriteback"),
            ("delete", "rw,noatime,writeback"),
            ("wal", "rw,noatime,nowriteback"),
            ("wal", "rw,noatime,writeback"),
        ] {
            let volume = Volume::new("1024", "32M", options);
            load_database(&volume, seed, journal);
            crate::settle_times(&volume.at);
            volume.judge();
        }
    }
}

pub fn load_database(volume: &Volume, seed: u64, journal: &str) {
    let beside = volume.draconis.make_dir("beside");
    let load = volume.draconis.path("load.sql");
    std::fs::write(&load, statements(&mut Random::new(seed), journal)).unwrap();
    let script = format!("sqlite3 -bail db <{} >/dev/null; sqlite3 db .dump", load.display());
    assert!(said(&script, &volume.at) == said(&script, &beside), "{journal}, seed {seed}");
    assert_eq!(said("sqlite3 db 'pragma integrity_check'", &volume.at), "ok\n");
    // Several processes share locks, and with a write-ahead log a mapping.
    let add = "sqlite3 db 'create table s (n)'; for w in 1 2 3; do (for i in 1 2 3 4 5 6; do \
               sqlite3 -cmd '.timeout 20000' db \"insert into s values ($i)\"; done) & done; \
               wait; sqlite3 db 'select sum(n) from s; pragma integrity_check'";
    assert_eq!(said(add, &volume.at), "63\nok\n", "{journal}, seed {seed}");
}

#[test]
fn a_store_of_keys_is_read_again() {
    let has = |module: &str| {
        let import = format!("import {module}");
        let tried = Command::new("python3").args(["-c", &import]).stderr(Stdio::null()).status();
        tried.is_ok_and(|status| status.success())
    };
    if !has("plyvel") {
        return skipped("loading LevelDB needs plyvel of python3");
    }
    if !fuse("loading LevelDB") {
        return;
    }
    let volume = Volume::new("4096", "64M", "rw,noatime");
    let script = "import plyvel, random
random.seed(1)
model = {}
for turn in range(4):
    db = plyvel.DB('db', create_if_missing=True, write_buffer_size=1 << 16, paranoid_checks=True)
    assert dict(db) == model
    for n in range(4000):
        key, value = b'%d' % random.randrange(3000), random.randbytes(random.randrange(300))
        if random.randrange(3) == 0:
            db.delete(key); model.pop(key, None)
        else:
            db.put(key, value, sync=n % 500 == 0); model[key] = value
    db.compact_range()
    db.close()
";
    run(Command::new("python3").args(["-c", script]).current_dir(&volume.at));
    volume.judge();
}

#[test]
fn a_repository_is_cloned() {
    if !can("cloning a repository", &["git"]) {
        return;
    }
    let volume = Volume::new("4096", "64M", "rw,noatime");
    clone_repository(&volume);
    volume.judge();
}

pub fn clone_repository(volume: &Volume) {
    shell(
        "export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_SYSTEM=/dev/null
         export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b
         git init -q first; cd first
         for i in 1 2 3 4; do
             mkdir dir$i; for j in 1 2 3 4 5 6 7 8 9; do seq $i $((i * j * 100)) >dir$i/$j; done
             ln -s dir$i link$i; git add .; git commit -qm \"number $i\"; git mv dir$i/1 moved$i
         done
         git commit -qam moved; git gc -q; cd ..
         git clone -q --no-hardlinks first second; git clone -q first third; cd second
         git fsck --strict --no-dangling; test -z \"$(git status --porcelain)\"
         git checkout -q HEAD~2; git checkout -q -; git repack -adq; git fsck --strict
         echo more >moved1; test \"$(git status --porcelain)\" = ' M moved1'
         git -C ../third fsck --strict",
        &volume.at,
    );
}

#[test]
fn a_program_is_built() {
    if !can("building a program", &["make", "cc"]) {
        return;
    }
    let volume = Volume::new("1024", "32M", "rw,noatime");
    build_program(&volume);
    volume.judge();
}

pub fn build_program(volume: &Volume) {
    let parts = (1..=6).map(|n| format!("part{n}.o")).collect::<Vec<_>>().join(" ");
    let makefile =
        format!("program: main.o {parts}\n\tcc -o $@ $^\n%.o: %.c all.h\n\tcc -g -c -o $@ $<\n");
    std::fs::write(volume.at("Makefile"), makefile).unwrap();
    std::fs::write(volume.at("all.h"), "#include <stdio.h>\n#define BASE 10\n").unwrap();
    let (mut main, mut sum) = (String::from("#include \"all.h\"\n"), String::from("0"));
    for n in 1..=6 {
        let part = format!("#include \"all.h\"\nint part{n}(void) {{ return BASE * {n}; }}\n");
        std::fs::write(volume.at(&format!("part{n}.c")), part).unwrap();
        let _ = writeln!(main, "int part{n}(void);");
        let _ = write!(sum, " + part{n}()");
    }
    let _ = writeln!(main, "int main(void) {{ printf(\"%d\\n\", {sum}); return 0; }}");
    std::fs::write(volume.at("main.c"), main).unwrap();
    assert_eq!(said("make -s -j4; ./program", &volume.at), "210\n");
    shell("make -q", &volume.at);
    let again = "sleep 0.05; sed -i s/10/100/ all.h; ! make -q; make -s -j4; make -q; ./program";
    assert_eq!(said(again, &volume.at), "2100\n");
}

#[test]
fn a_tree_is_synchronised_and_found_in_step() {
    if !can("synchronising a tree", &["rsync"]) {
        return;
    }
    let volume = Volume::new("1024", "64M", "rw,noatime");
    let tree = volume.draconis.make_dir("tree");
    odd_tree(&tree);
    std::fs::remove_file(tree.join("sparse")).unwrap();
    let script = format!("rsync -aHAXSi {}/ copy", tree.display());
    assert!(!said(&script, &volume.at).is_empty());
    // Neither checksums nor times differ.
    assert_eq!(said(&script, &volume.at), "");
    assert_eq!(said(&script.replace("-aHAXSi", "-aHAXSic --delete"), &volume.at), "");
    std::fs::write(tree.join("one"), "another one").unwrap();
    std::fs::remove_dir_all(tree.join("deep/er/still")).unwrap();
    said(&script.replace("-aHAXSi", "-aHAXSi --inplace --delete"), &volume.at);
    assert_eq!(said(&script.replace("-aHAXSi", "-aHAXSic --delete"), &volume.at), "");
    volume.judge();
}

#[test]
fn an_archive_is_the_same_unpacked() {
    if !can("unpacking an archive", &["tar"]) {
        return;
    }
    let volume = Volume::new("4096", "64M", "rw,noatime,writeback");
    unpack_archive(&volume);
    volume.judge();
}

pub fn unpack_archive(volume: &Volume) {
    let tree = volume.draconis.make_dir("tree");
    odd_tree(&tree);
    std::fs::remove_file(tree.join("sparse")).unwrap();
    let archive = volume.draconis.path("tree.tar");
    run(Command::new("tar").arg("-C").arg(&tree).arg("--sparse").arg("-cf").arg(&archive).arg("."));
    // tar compares types, modes, owners, times and contents.
    shell(&format!("tar -xpf {0}; tar -df {0}", archive.display()), &volume.at);
}

#[test]
fn what_stresses_file_systems() {
    if !can("stressing", &["stress-ng"]) {
        return;
    }
    let volume = Volume::new("4096", "512M", "rw,noatime");
    let output = Command::new("stress-ng")
        .args(match long() {
            true => &["--class", "filesystem", "--seq", "1", "-t", "1", "--verify"][..],
            false => &["--dir", "1", "--rename", "1", "--symlink", "1", "-t", "2", "--verify"],
        })
        .arg("--temp-path")
        .arg(&volume.at)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    let failed: Vec<&str> = said.lines().filter(|line| line.contains("fail:")).collect();
    assert!(failed.is_empty(), "{failed:#?}");
    volume.judge();
}
