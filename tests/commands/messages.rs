//! Error messages: each names the object once, states the failure in words, and gives the next
//! step.

use crate::common;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::common::{Draconis, copy_draconis, is_installed, is_root, report_skipped};

/// Runs a command line, with `D/` as the directory of the test; returns its error output.
fn run_and_get_stderr(draconis: &Draconis, line: &str) -> String {
    let dir = format!("{}/", draconis.dir.path().display());
    let arguments = line.split(' ').map(|word| word.replace("D/", &dir));
    let output = draconis.run(arguments);
    let errors = String::from_utf8_lossy(&output.stderr).replace(&dir, "D/");
    assert!(matches!(output.status.code(), Some(1 | 4 | 8)), "{line}: {} {errors}", output.status);
    assert_message_rules(line, &errors);
    errors
}

/// Asserts the rules for every message.
fn assert_message_rules(line: &str, said: &str) {
    assert!(!said.contains("os error"), "{line}: {said}");
    for message in said.lines() {
        assert!(message.starts_with("draconis: "), "{line}: {said}");
        let words: Vec<&str> = message.split(": ").collect();
        assert!(words.windows(2).all(|pair| pair[0] != pair[1]), "{line}: {said}");
        for path in message.split([' ', ':', ';']).filter(|word| word.starts_with("D/")) {
            assert!(message.matches(path).count() <= 2, "{line}: {said}");
        }
    }
}

fn make_volume(draconis: &Draconis) -> PathBuf {
    let image = draconis.path("v.img");
    draconis.run_ok(["format", "-t", "ext2", "-b", "1024", image.to_str().unwrap(), "8M"]);
    std::fs::write(draconis.path("file"), "contents").unwrap();
    let at = |path: &str| format!("{}:{path}", image.display());
    draconis.run_ok(["put", draconis.path("file").to_str().unwrap(), &at("/f")]);
    draconis.run_ok(["mkdir", &at("/d")]);
    image
}

#[test]
fn every_error_is_one_sentence() {
    let draconis = Draconis::new();
    make_volume(&draconis);
    std::fs::write(draconis.path("empty"), "").unwrap();
    std::fs::write(draconis.path("zeros"), vec![0; 65536]).unwrap();
    let mut table = vec![0; 1 << 20];
    table[510..512].copy_from_slice(&[0x55, 0xaa]);
    std::fs::write(draconis.path("disk"), &table).unwrap();
    table[..4].copy_from_slice(b"XFSB");
    std::fs::write(draconis.path("xfs"), &table).unwrap();
    let volume = std::fs::read(draconis.path("v.img")).unwrap();
    std::fs::write(draconis.path("cut"), &volume[..1500]).unwrap();
    draconis.make_dir("dir");
    for reading in ["ls", "info", "tree", "tar", "stat", "cat"] {
        for (image, sentence) in [
            ("none", "D/none: No such file or directory"),
            ("empty", "D/empty: too short for a volume, or empty"),
            ("cut", "D/cut: too short for a volume, or empty"),
            ("file", "D/file: too short for a volume, or empty"),
            (
                "xfs",
                "D/xfs: not an ext volume; it holds an XFS file system, and mount(8) mounts it",
            ),
            (
                "disk",
                "D/disk: not an ext volume; it holds a partition table or boot sector, and \
                 --partition N takes one",
            ),
            ("dir", "D/dir is a directory, and no image"),
        ] {
            let found = run_and_get_stderr(&draconis, &format!("{reading} D/{image}"));
            assert_eq!(found, format!("draconis: {sentence}\n"), "{reading}");
        }
        let zeros = run_and_get_stderr(&draconis, &format!("{reading} D/zeros"));
        assert!(zeros.contains("--offset and --partition") && !zeros.contains("format"));
    }
    for (line, sentence) in [
        (
            "cat D/v.img:/d",
            "D/v.img:/d: is a directory; draconis ls lists it, draconis tar archives it",
        ),
        ("tree D/v.img:/f", "D/v.img:/f: not a directory; draconis ls -l shows what it is"),
        ("ls D/v.img:/f/x", "D/v.img:/f/x: not a directory"),
        ("stat D/v.img:/none", "D/v.img:/none: no such file or directory"),
        ("get D/v.img:/f D/none/x", "D/none: no such directory"),
        ("mkdir D/v.img:/x/y", "D/v.img:/x: no such file or directory; draconis mkdir -p makes it"),
        ("put D/none D/v.img:/", "D/none: No such file or directory"),
        ("put D/file D/none:/", "D/none: no such file; draconis format makes a volume"),
        (
            "put D/v.img:/f D/new",
            "D/v.img:/f: no such file; draconis get D/v.img:/f D/new copies it out of the image",
        ),
        ("mkdir D/dir:/x", "D/dir is a directory, and no image"),
        ("mkdir D/empty:/x", "D/empty: too short for a volume, or empty"),
        ("grow D/empty", "D/empty: too short for a volume, or empty"),
        ("shrink --min D/empty", "D/empty: too short for a volume, or empty"),
        ("set-label D/empty x", "D/empty: too short for a volume, or empty"),
        (
            "cp D/xfs:/a D/v.img:/b",
            "D/xfs: not an ext volume; it holds an XFS file system, and mount(8) mounts it",
        ),
        ("untar -f D/none D/v.img:/", "D/none: No such file or directory"),
        ("untar -f D/file D/v.img:/", "D/file: not a tar archive"),
        ("untar -f D/dir D/v.img:/", "D/dir: is a directory; draconis put -r takes one"),
        ("format D/none/x 1M", "D/none: no such directory; mkdir -p makes it"),
        ("format --from D/none D/x", "D/none: No such file or directory"),
        ("store ls D/none", "D/none: no such file; draconis store create makes a store"),
    ] {
        assert_eq!(run_and_get_stderr(&draconis, line), format!("draconis: {sentence}\n"));
    }
    let archive = draconis.path("a.tar");
    let mut tar = Command::new("tar");
    tar.arg("-C").arg(draconis.dir.path()).arg("-cf").arg(&archive).arg("file");
    assert!(tar.status().unwrap().success());
    assert_eq!(
        run_and_get_stderr(&draconis, "untar -f D/a.tar D/v.img:/none"),
        "draconis: D/v.img:/none: no such directory; draconis mkdir -p makes it\n"
    );
    let tree = draconis.run_ok(["tree", draconis.path("v.img").to_str().unwrap()]);
    assert!(tree.ends_with("\n2 directories, 1 file\n"), "{tree}");
    let tree = draconis.run_ok(["tree", &format!("{}:/d", draconis.path("v.img").display())]);
    assert!(tree.ends_with("\n0 directories, 0 files\n"), "{tree}");
}

/// Each command reports a broken root directory as damage, with one hint.
#[test]
fn damage_is_reported_with_one_hint() {
    let draconis = Draconis::new();
    let image = make_volume(&draconis);
    let bytes = std::fs::read(&image).unwrap();
    let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize;
    // Inode table of the first group; in it the root inode's first block.
    let root = u32_at(2048 + 8) * 1024 + 256;
    let block = u32_at(root + 40) * 1024;
    let spoil = |name: &str, at: usize, new: &[u8]| {
        let mut bytes = bytes.clone();
        bytes[at..at + new.len()].copy_from_slice(new);
        std::fs::write(draconis.path(name), bytes).unwrap();
    };
    spoil("root", block + 4, &[3, 0]);
    spoil("table", 2048 + 8, &[0xff; 4]);
    spoil("super", 1024 + 24, &[200]);
    spoil("flag", 1024 + 58, &[3, 0]);
    std::fs::write(draconis.path("short"), &bytes[..5 << 20]).unwrap();

    let repaired =
        "the volume is damaged: draconis check shows all damage, draconis repair repairs it";
    for line in ["ls D/root", "ls -lR D/root", "tree D/root", "get -r D/root:/ D/out"] {
        let found = run_and_get_stderr(&draconis, line);
        assert!(found.starts_with("draconis: D/root:/: corrupt directory entry"), "{found}");
        assert_eq!(found.matches(repaired).count(), 1, "{found}");
    }
    for line in ["ls D/table", "mkdir D/table:/x", "put D/file D/root:/x", "info D/super"] {
        assert!(
            run_and_get_stderr(&draconis, line).ends_with(&format!("; {repaired}\n")),
            "{line}"
        );
    }
    for name in ["root", "table", "flag", "short"] {
        let path = draconis.path(name);
        let info = draconis.run_ok(["info", path.to_str().unwrap()]);
        let damaged = info.lines().find(|line| line.starts_with("damaged ")).unwrap();
        let step = if name == "short" { "draconis get -r" } else { "draconis repair repairs it" };
        assert!(damaged.contains(step), "{info}");
        let json = draconis.run_ok(["info", "--json", path.to_str().unwrap()]);
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(json["damage"].as_array().unwrap().len(), 1, "{json}");
    }
    let sound = draconis.run_ok(["info", image.to_str().unwrap()]);
    assert!(!sound.contains("damaged") && !sound.contains("e2fsck"), "{sound}");
    spoil("unclean", 1024 + 58, &[0, 0]);
    let unclean = draconis.run_ok(["info", draconis.path("unclean").to_str().unwrap()]);
    assert!(unclean.contains("e2fsck -p repairs what a power cut left"), "{unclean}");
    let checked = draconis.run(["check", draconis.path("root").to_str().unwrap()]);
    let checked = String::from_utf8_lossy(&checked.stdout).into_owned();
    assert!(
        checked.ends_with(
            ", damaged; copy what can be read (draconis get -r); draconis repair -n shows what a \
             repair would do\n"
        ),
        "{checked}"
    );
}

/// The error names the external journal, and the program that can replay it.
#[test]
fn external_journal_is_refused_by_name() {
    use std::os::unix::fs::FileExt as _;
    let draconis = Draconis::new();
    let image = draconis.path("outside");
    draconis.run_ok(["format", "-t", "ext3", image.to_str().unwrap(), "16M"]);
    let file = std::fs::File::options().read(true).write(true).open(&image).unwrap();
    // s_journal_uuid, s_journal_inum, s_journal_dev: 8:17.
    file.write_all_at(&[0xab; 16], 1024 + 0xd0).unwrap();
    file.write_all_at(&[0, 0, 0, 0, 0x11, 8, 0, 0], 1024 + 0xe0).unwrap();
    let journal = "(device 8:17, UUID abababab-abab-abab-abab-abababababab)";
    draconis.run_ok(["ls", image.to_str().unwrap()]);
    let found = run_and_get_stderr(&draconis, "mkdir D/outside:/x");
    assert!(found.contains(journal) && found.contains("journal_path=JOURNAL"), "{found}");
    let found = run_and_get_stderr(&draconis, "check D/outside");
    assert!(found.contains(journal) && found.contains("e2fsck -j JOURNAL"), "{found}");
    // Without inode 8.
    file.write_all_at(&[8, 0, 0, 0, 0, 0, 0, 0], 1024 + 0xe0).unwrap();
    draconis_testkit::judge::debugfs_write(&image, "clri <8>");
    let found = run_and_get_stderr(&draconis, "mkdir D/outside:/x");
    assert!(found.contains("corrupt journal") && found.contains("inode 8"), "{found}");
    file.write_all_at(&[0, 0, 0, 0, 0x11, 8, 0, 0], 1024 + 0xe0).unwrap();
    // needs_recovery
    let mut features = [0];
    file.read_exact_at(&mut features, 1024 + 0x60).unwrap();
    file.write_all_at(&[features[0] | 4], 1024 + 0x60).unwrap();
    let found = run_and_get_stderr(&draconis, "ls D/outside");
    assert!(found.contains(journal) && found.contains("e2fsck -p -j JOURNAL"), "{found}");
}

#[test]
fn busy_forbidden_and_full_errors_are_reported() {
    let draconis = Draconis::new();
    let image = make_volume(&draconis);
    let held = std::fs::File::open(&image).unwrap();
    held.lock().unwrap();
    let found = run_and_get_stderr(&draconis, "ls D/v.img");
    assert_eq!(found, "draconis: D/v.img is mounted or being changed; see draconis status\n");
    let found = run_and_get_stderr(&draconis, "mkdir D/v.img:/x");
    assert_eq!(found, "draconis: D/v.img is in use; unmount it first\n");
    held.unlock().unwrap();
    if !is_root() || !is_installed("setpriv") {
        report_skipped("what is forbidden and what is full need root and setpriv");
        return;
    }
    let open = |path: &Path, mode| {
        let mode = std::os::unix::fs::PermissionsExt::from_mode(mode);
        std::fs::set_permissions(path, mode).unwrap();
    };
    open(draconis.dir.path(), 0o755);
    open(&image, 0o600);
    let program = draconis.path("draconis");
    copy_draconis(&program);
    for command in [&["ls"][..], &["mkdir"], &["check"]] {
        let mut run = Command::new("setpriv");
        run.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(&program).args(command);
        let output = run.arg(format!("{}:/x", image.display())).stdin(Stdio::null()).output();
        let found = String::from_utf8_lossy(&output.unwrap().stderr).into_owned();
        let words = ": Permission denied; ls -l shows who may\n";
        let missing = ": No such file or directory\n";
        // `check` takes the image's name as it is.
        assert!(found.ends_with(if command == ["check"] { missing } else { words }), "{found}");
    }
    let small = draconis.make_dir("small");
    let mut mount = Command::new("mount");
    mount.args(["-t", "tmpfs", "-o", "size=1M", "tmpfs"]).arg(&small);
    if !mount.status().unwrap().success() {
        report_skipped("what is full needs a tmpfs");
        return;
    }
    // Unmounted at the end of the test, even if it fails.
    let _small = common::KernelMount { at: small.clone() };
    std::fs::write(draconis.path("much"), vec![7; 3 << 20]).unwrap();
    run_successfully(&draconis, "put D/much D/v.img:/much");
    let found = run_and_get_stderr(&draconis, "get D/v.img:/much D/small/much");
    assert_eq!(
        found,
        "draconis: D/small/much: cannot be written: No space left on device; make room there\n"
    );
    assert!(!small.join("much").exists(), "part of a file");
    // One error, however many files do not fit.
    for nth in 0..40 {
        run_successfully(
            &draconis,
            &format!("put D/much D/v.img:/d/f{nth}").replace("much", "file"),
        );
    }
    run_successfully(&draconis, "put D/much D/v.img:/d/a");
    let found = run_and_get_stderr(&draconis, "get -r D/v.img:/d D/small/d");
    assert_eq!(found.lines().count(), 1, "{found}");
    assert!(found.contains("stopped") && found.contains("No space left"), "{found}");
    std::fs::remove_dir_all(small.join("d")).unwrap();
    std::fs::File::create(small.join("v.img")).unwrap().set_len(8 << 20).unwrap();
    run_successfully(&draconis, "format D/small/v.img");
    let found = run_and_get_stderr(&draconis, "put D/much D/small/v.img:/much");
    assert!(found.contains(" failed: No space left on device"), "{found}");
    assert!(found.contains("what was changed last is not there, and draconis check"), "{found}");
}

fn run_successfully(draconis: &Draconis, line: &str) {
    let dir = format!("{}/", draconis.dir.path().display());
    draconis.run_ok(line.split(' ').map(|word| word.replace("D/", &dir)));
}

#[test]
fn closed_stdout_ends_command_silently() {
    let draconis = Draconis::new();
    make_volume(&draconis);
    let store = draconis.path("s.store");
    draconis.run_ok([
        "store",
        "create",
        store.to_str().unwrap(),
        "--size",
        "16M",
        "--layout",
        "cow",
    ]);
    let dir = format!("{}/", draconis.dir.path().display());
    for line in [
        "status",
        "status --json",
        "check D/v.img",
        "check --json D/v.img",
        "info D/v.img",
        "ls -lR D/v.img:/",
        "store check D/s.store",
        "store info --json D/s.store",
        "store grow D/s.store 24M",
        "store disk D/s.store a 1M",
        "kv stats --json D/s.store",
        "completions bash",
        "--help",
    ] {
        // The reader closes the pipe before the command begins.
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = draconis.command();
        let command = command.args(line.split(' ').map(|word| word.replace("D/", &dir)));
        let output = command.stdout(writer).stderr(Stdio::piped()).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(
            matches!(output.status.code(), Some(0 | 141)) && errors.is_empty(),
            "{line}: {errors}"
        );
    }
    // A closed standard error does not change the exit status.
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = draconis.command();
    let status = command.args(["info", &format!("{dir}none")]).stderr(writer).status().unwrap();
    assert_eq!(status.code(), Some(1));
}
