//! Mounts of images, at directories, whose names are not UTF-8.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::common::volume::run_e2fsck;
use crate::common::{Draconis, copy_draconis, has_fuse, is_root, mke2fs, mounts_below, wait_until};

fn odd_path(draconis: &Draconis, below: &[u8]) -> PathBuf {
    draconis.dir.path().join(OsStr::from_bytes(below))
}

fn hex(path: &Path) -> String {
    path.as_os_str().as_bytes().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the path as the program shows it.
fn shown(path: &Path) -> String {
    let text = path.as_os_str().as_bytes().utf8_chunks().map(|chunk| {
        let bad: String = chunk.invalid().iter().map(|byte| format!("\\x{byte:02x}")).collect();
        format!("{}{bad}", chunk.valid())
    });
    text.collect()
}

fn output_text(output: &Output) -> String {
    format!(
        "{}{}",
        std::str::from_utf8(&output.stdout).unwrap(),
        std::str::from_utf8(&output.stderr).unwrap()
    )
}

#[test]
fn paths_that_are_not_utf8_are_mounted_and_shown() {
    if !has_fuse("mounting at names that are not UTF-8") {
        return;
    }
    let draconis = Draconis::new();
    let (image, at) =
        (odd_path(&draconis, b"dir\xff/disk\xfe.img"), odd_path(&draconis, b"at\xff"));
    for dir in [image.parent().unwrap(), &at] {
        std::fs::create_dir_all(dir).unwrap();
    }
    mke2fs(&image, None, &["-t", "ext4"], "16M");
    let run = |words: &[&OsStr]| draconis.run(words);
    let mount = || run(&["mount".as_ref(), image.as_ref(), at.as_ref()]);
    let mounted = mount();
    assert!(mounted.status.success(), "{}", output_text(&mounted));
    std::fs::write(at.join("before"), "before").unwrap();

    let again = mount();
    assert!(!again.status.success() && output_text(&again).contains(&shown(&image)));
    let status = draconis.status();
    let listed = &status["mounts"][0];
    for (name, path) in [("volume", &image), ("mount_point", &at)] {
        assert_eq!(listed[name], shown(path), "{status}");
        assert_eq!(listed[format!("{name}_hex")], hex(path), "{status}");
    }
    let printed = run(&["status".as_ref(), at.as_ref()]);
    let line = format!("{} on {}\n", shown(&image), shown(&at));
    assert!(output_text(&printed).starts_with(&line), "{printed:?}");

    let worker = listed["worker_pid"].as_i64().unwrap();
    let worker = rustix::process::Pid::from_raw(worker as i32).unwrap();
    rustix::process::kill_process(worker, rustix::process::Signal::KILL).unwrap();
    assert_eq!(std::fs::read_to_string(at.join("before")).unwrap(), "before");
    wait_until("the worker is restarted", || draconis.status()["mounts"][0]["restarts"] == 1);
    std::fs::write(at.join("between"), "between").unwrap();

    let program = draconis.path("draconis-new");
    copy_draconis(&program);
    let mut upgrade = Command::new(&program);
    upgrade.arg("upgrade").env("DRACONIS_RUNTIME_DIR", draconis.path("run"));
    let upgraded = upgrade.output().unwrap();
    let text = output_text(&upgraded);
    assert!(upgraded.status.success() && text.starts_with(&shown(&at)), "{text}");
    assert_eq!(std::fs::read_to_string(at.join("between")).unwrap(), "between");
    std::fs::write(at.join("after"), "after").unwrap();
    if is_root() {
        for mode in ["remount,ro", "remount,rw"] {
            let done = run(&["mount".as_ref(), "-o".as_ref(), mode.as_ref(), at.as_ref()]);
            assert!(done.status.success(), "{}", output_text(&done));
        }
    }
    let file = std::fs::File::open(at.join("after")).unwrap();
    let busy = run(&["umount".as_ref(), at.as_ref()]);
    assert!(output_text(&busy).contains(&format!("{} is busy", shown(&at))), "{busy:?}");
    drop(file);
    let unmounted = run(&["umount".as_ref(), at.as_ref()]);
    assert!(unmounted.status.success(), "{}", output_text(&unmounted));
    assert!(mounts_below(draconis.dir.path()).is_empty());
    let gone = run(&["umount".as_ref(), at.as_ref()]);
    let text = output_text(&gone);
    assert!(text.contains(&format!("{}: nothing is mounted there", shown(&at))), "{text}");
    run_e2fsck(&image);
    for name in ["before", "between", "after"] {
        let mut target = image.as_os_str().to_owned();
        target.push(format!(":/{name}"));
        assert_eq!(run(&["cat".as_ref(), &target]).stdout, name.as_bytes());
    }
}
