//! Copies on the host, by `get`, `rescue`, `undelete` and `tar`: attributes that the host refuses,
//! and files that never have their name while they are not whole.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::common::{Draconis, has_root, has_tool, wait_until};
use rustix::process::{Pid, Signal, kill_process};

/// Makes a volume of some files in `tree`, with owners if this is root.
fn make_volume(draconis: &Draconis) -> PathBuf {
    let (image, tree) = (draconis.path("v.img"), draconis.make_dir("tree"));
    fs::create_dir(tree.join("dir")).unwrap();
    for name in ["one", "two", "dir/three"] {
        let path = tree.join(name);
        fs::write(&path, format!("text of {name}\n")).unwrap();
        fs::set_permissions(&path, PermissionsExt::from_mode(0o640)).unwrap();
        let old = std::time::UNIX_EPOCH + std::time::Duration::from_secs(981_173_106);
        fs::File::options().write(true).open(&path).unwrap().set_modified(old).unwrap();
    }
    fs::set_permissions(tree.join("two"), PermissionsExt::from_mode(0o4755)).unwrap();
    std::os::unix::fs::symlink("one", tree.join("link")).unwrap();
    let arguments = ["format", "-t", "ext4", "--owner", "1000:1000", "--from"];
    let paths = [tree.as_os_str(), image.as_os_str(), "16M".as_ref()];
    draconis.run_ok(arguments.iter().map(AsRef::as_ref).chain(paths));
    image
}

/// Returns what of a copied file must be right with any owner.
fn mode_and_time(path: &Path) -> (u32, i64) {
    let found = fs::symlink_metadata(path).unwrap();
    (found.mode() & 0o7777, found.mtime())
}

/// As `cp -a` does: without the right to give files away, everything but the owners is copied.
#[test]
fn copies_without_owners_keep_the_rest_and_say_so_once() {
    let test = "copies without owners";
    if !has_root(test) || !has_tool(test, "setpriv") {
        return;
    }
    let draconis = Draconis::new();
    let image = make_volume(&draconis);
    let (image, whole) = (image.display(), format!("{}:/", image.display()));
    for (command, out) in
        [(vec!["get", "-r", &whole], "got"), (vec!["rescue", &image.to_string()], "rescued")]
    {
        let out = draconis.path(out);
        let program = draconis.command();
        let mut run = Command::new("setpriv");
        run.args(["--bounding-set", "-chown"]).arg(program.get_program());
        let output = run.args(&command).arg(&out).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{errors}");
        assert_eq!(errors.lines().count(), 1, "{errors}");
        assert!(errors.contains(" more: copied without the owner: Operation not"), "{errors}");
        for (name, mode) in [("one", 0o640), ("dir/three", 0o640), ("two", 0o755)] {
            assert_eq!(mode_and_time(&out.join(name)), (mode, 981_173_106), "{command:?} {name}");
            assert_eq!(fs::read(out.join(name)).unwrap(), format!("text of {name}\n").as_bytes());
        }
        assert_eq!(fs::read_link(out.join("link")).unwrap(), Path::new("one"));
    }
}

/// Returns the names in a directory that are not whole files.
fn parts_in(dir: &Path) -> Vec<String> {
    let names = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name());
    let names = names.map(|name| name.into_string().unwrap());
    names.filter(|name| name.ends_with(".part")).collect()
}

/// Makes a volume of a long file.
fn make_long_file(draconis: &Draconis) -> (PathBuf, Vec<u8>) {
    let (image, tree) = (draconis.path("long.img"), draconis.make_dir("long"));
    let contents: Vec<u8> = (0..48_u32 << 20).map(|at| (at >> 5) as u8 | 1).collect();
    fs::write(tree.join("file"), &contents).unwrap();
    let arguments = ["format", "-t", "ext4", "--from"];
    let paths = [tree.as_os_str(), image.as_os_str(), "64M".as_ref()];
    draconis.run_ok(arguments.iter().map(AsRef::as_ref).chain(paths));
    (image, contents)
}

/// A signal amid a file: its name has what it had before, or all of the new file. The copy ends
/// first on a fast machine.
#[test]
fn signals_leave_no_part_of_a_file() {
    let draconis = Draconis::new();
    let (image, contents) = make_long_file(&draconis);
    let source = format!("{}:/file", image.display());
    let mut ended_by_signal = 0;
    for (nth, signal) in [Signal::INT, Signal::TERM, Signal::HUP].into_iter().enumerate() {
        let dir = draconis.make_dir(&format!("out{nth}"));
        fs::write(dir.join("file"), "old").unwrap();
        let mut get = draconis.command();
        get.args(["get", &source]).arg(&dir).stderr(Stdio::piped());
        let mut get = get.spawn().unwrap();
        wait_until("the file was begun, or is there", || {
            !parts_in(&dir).is_empty() || get.try_wait().unwrap().is_some()
        });
        if get.try_wait().unwrap().is_none() {
            kill_process(Pid::from_child(&get), signal).unwrap();
        }
        let output = get.wait_with_output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(parts_in(&dir), [""; 0], "{errors}");
        let found = fs::read(dir.join("file")).unwrap();
        if output.status.success() {
            assert!(found == contents, "the file is not whole");
            continue;
        }
        ended_by_signal += 1;
        assert_eq!(output.status.code(), Some(128 + signal.as_raw()), "{errors}");
        assert!(
            errors.starts_with("draconis: interrupted: the copied files are whole"),
            "{errors}"
        );
        assert!(found == b"old" || found == contents, "part of the file");
    }
    eprintln!("{ended_by_signal} copies were ended by a signal");
}

/// A command that waits for its input ends with one line; what it has put stays whole.
#[test]
fn signals_end_a_command_with_a_line() {
    let draconis = Draconis::new();
    let image = make_volume(&draconis);
    for (signal, ignored) in [(Signal::INT, false), (Signal::TERM, false), (Signal::INT, true)] {
        let mut put = match ignored {
            false => draconis.command(),
            true => {
                let mut shell = Command::new("sh");
                shell.args(["-c", "trap '' INT; exec \"$0\" \"$@\""]);
                shell.arg(draconis.command().get_program());
                shell
            }
        };
        put.args(["put", "--progress=always", "-"]).arg(format!("{}:/put", image.display()));
        let mut put = put.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        // More than a pipe holds: once it is written, the command reads, after its handlers are there.
        let mut input = put.stdin.take().unwrap();
        input.write_all(&vec![7; 4 << 20]).unwrap();
        kill_process(Pid::from_child(&put), signal).unwrap();
        if ignored {
            drop(input);
            assert!(put.wait().unwrap().success(), "an ignored signal ended the command");
            continue;
        }
        let output = put.wait_with_output().unwrap();
        drop(input);
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(128 + signal.as_raw()), "{errors}");
        assert!(errors.contains("draconis: interrupted: the volume is consistent"), "{errors}");
        draconis.run_ok(["check".as_ref(), image.as_os_str()]);
    }
    assert_eq!(fs::read(draconis.path("tree/one")).unwrap(), b"text of one\n");
}
