//! Common programs that check themselves: databases, archives, builds.

use std::fmt::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use draconis_device::Random;

use crate::common::volume::{MountedVolume, run_ok, run_shell};
use crate::common::{has_fuse, is_installed, make_odd_tree, report_skipped};
use crate::storms::{should_run_long_tests, test_seeds};

/// Returns true if a test can run; otherwise reports what is missing.
pub fn can_run(test: &str, programs: &[&str]) -> bool {
    let missing: Vec<_> = programs.iter().filter(|program| !is_installed(program)).collect();
    if !missing.is_empty() {
        report_skipped(format_args!("{test} needs {missing:?}"));
    }
    missing.is_empty() && has_fuse(test)
}

/// Runs a shell script; returns its output.
pub fn shell_output(script: &str, at: &Path) -> String {
    let output = Command::new("sh").args(["-euc", script]).current_dir(at).output().unwrap();
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{script}: {complaint}");
    String::from_utf8(output.stdout).unwrap()
}

/// Returns a database workload, determined by the seed.
fn random_sql_script(random: &mut Random, journal: &str) -> String {
    let mut sql = format!(
        "pragma journal_mode={journal}; pragma page_size=1024; pragma cache_size=20;
         create table t (k integer primary key, v blob); create index i on t (v);\n"
    );
    for _ in 0..60 {
        sql.push_str("begin;\n");
        for _ in 0..random.next_below(40) {
            let (key, len) = (random.next_below(400), random.next_below(900));
            let _ = match random.next_below(4) {
                0 => writeln!(sql, "delete from t where k % 17 = {};", key % 17),
                1 => writeln!(sql, "update t set v = zeroblob({len}) where k < {};", key / 20),
                _ => writeln!(sql, "replace into t values ({key}, printf('%.{len}c', 'v{key}'));"),
            };
        }
        sql.push_str(["commit;\n", "commit;\n", "rollback;\n"][random.next_below(3) as usize]);
        if random.next_below(20) == 0 {
            sql.push_str("vacuum;\n");
        }
    }
    sql
}

#[test]
#[ignore = "tools: sqlite3"]
fn sqlite_database_keeps_integrity() {
    if !can_run("loading a database", &["sqlite3"]) {
        return;
    }
    for seed in test_seeds() {
        for (journal, options) in [
            ("delete", "rw,noatime,nowriteback"),
            ("delete", "rw,noatime,writeback"),
            ("wal", "rw,noatime,nowriteback"),
            ("wal", "rw,noatime,writeback"),
        ] {
            let volume = MountedVolume::new("1024", "32M", options);
            run_database_workload(&volume, seed, journal);
            crate::storms::set_all_times(&volume.at);
            volume.unmount_and_check();
        }
    }
}

pub fn run_database_workload(volume: &MountedVolume, seed: u64, journal: &str) {
    let beside = volume.draconis.make_dir("beside");
    let load = volume.draconis.path("load.sql");
    std::fs::write(&load, random_sql_script(&mut Random::new(seed), journal)).unwrap();
    let script = format!("sqlite3 -bail db <{} >/dev/null; sqlite3 db .dump", load.display());
    assert!(
        shell_output(&script, &volume.at) == shell_output(&script, &beside),
        "{journal}, seed {seed}"
    );
    assert_eq!(shell_output("sqlite3 db 'pragma integrity_check'", &volume.at), "ok\n");
    // Several processes share locks, and with a write-ahead log a mapping.
    let add = "sqlite3 db 'create table s (n)'; for w in 1 2 3; do (for i in 1 2 3 4 5 6; do \
               sqlite3 -cmd '.timeout 20000' db \"insert into s values ($i)\"; done) & done; \
               wait; sqlite3 db 'select sum(n) from s; pragma integrity_check'";
    assert_eq!(shell_output(add, &volume.at), "63\nok\n", "{journal}, seed {seed}");
}

#[test]
#[ignore = "tools: plyvel"]
fn key_value_store_is_read_back() {
    let has = |module: &str| {
        let import = format!("import {module}");
        let tried = Command::new("python3").args(["-c", &import]).stderr(Stdio::null()).status();
        tried.is_ok_and(|status| status.success())
    };
    if !has("plyvel") {
        return report_skipped("loading LevelDB needs plyvel of python3");
    }
    if !has_fuse("loading LevelDB") {
        return;
    }
    let volume = MountedVolume::new("4096", "64M", "rw,noatime");
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
    run_ok(Command::new("python3").args(["-c", script]).current_dir(&volume.at));
    volume.unmount_and_check();
}

#[test]
#[ignore = "tools: git"]
fn git_repository_is_cloned() {
    if !can_run("cloning a repository", &["git"]) {
        return;
    }
    let volume = MountedVolume::new("4096", "64M", "rw,noatime");
    clone_repository(&volume);
    volume.unmount_and_check();
}

pub fn clone_repository(volume: &MountedVolume) {
    run_shell(
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
fn program_builds_on_mount() {
    if !can_run("building a program", &["make", "cc"]) {
        return;
    }
    let volume = MountedVolume::new("1024", "32M", "rw,noatime");
    build_program(&volume);
    volume.unmount_and_check();
}

pub fn build_program(volume: &MountedVolume) {
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
    assert_eq!(shell_output("make -s -j4; ./program", &volume.at), "210\n");
    run_shell("make -q", &volume.at);
    let again = "sleep 0.05; sed -i s/10/100/ all.h; ! make -q; make -s -j4; make -q; ./program";
    assert_eq!(shell_output(again, &volume.at), "2100\n");
}

#[test]
#[ignore = "tools: rsync"]
fn rsync_finds_no_difference() {
    if !can_run("synchronising a tree", &["rsync"]) {
        return;
    }
    let volume = MountedVolume::new("1024", "64M", "rw,noatime");
    let tree = volume.draconis.make_dir("tree");
    make_odd_tree(&tree);
    std::fs::remove_file(tree.join("sparse")).unwrap();
    let script = format!("rsync -aHAXSi {}/ copy", tree.display());
    assert!(!shell_output(&script, &volume.at).is_empty());
    // Neither checksums nor times differ.
    assert_eq!(shell_output(&script, &volume.at), "");
    assert_eq!(shell_output(&script.replace("-aHAXSi", "-aHAXSic --delete"), &volume.at), "");
    std::fs::write(tree.join("one"), "another one").unwrap();
    std::fs::remove_dir_all(tree.join("deep/er/still")).unwrap();
    shell_output(&script.replace("-aHAXSi", "-aHAXSi --inplace --delete"), &volume.at);
    assert_eq!(shell_output(&script.replace("-aHAXSi", "-aHAXSic --delete"), &volume.at), "");
    volume.unmount_and_check();
}

#[test]
fn unpacked_archive_matches_source() {
    if !can_run("unpacking an archive", &["tar"]) {
        return;
    }
    let volume = MountedVolume::new("4096", "64M", "rw,noatime,writeback");
    unpack_archive(&volume);
    volume.unmount_and_check();
}

pub fn unpack_archive(volume: &MountedVolume) {
    let tree = volume.draconis.make_dir("tree");
    make_odd_tree(&tree);
    std::fs::remove_file(tree.join("sparse")).unwrap();
    let archive = volume.draconis.path("tree.tar");
    run_ok(
        Command::new("tar").arg("-C").arg(&tree).arg("--sparse").arg("-cf").arg(&archive).arg("."),
    );
    // tar compares types, modes, owners, times and contents.
    run_shell(&format!("tar -xpf {0}; tar -df {0}", archive.display()), &volume.at);
}

#[test]
#[ignore = "tools: stress-ng"]
fn stress_programs_run() {
    if !can_run("stressing", &["stress-ng"]) {
        return;
    }
    let volume = MountedVolume::new("4096", "512M", "rw,noatime");
    let output = Command::new("stress-ng")
        .args(match should_run_long_tests() {
            true => &["--class", "filesystem", "--seq", "1", "-t", "1", "--verify"][..],
            false => &["--dir", "1", "--rename", "1", "--symlink", "1", "-t", "2", "--verify"],
        })
        .arg("--temp-path")
        .arg(&volume.at)
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    let failed: Vec<&str> = errors.lines().filter(|line| line.contains("fail:")).collect();
    assert!(failed.is_empty(), "{failed:#?}");
    volume.unmount_and_check();
}
