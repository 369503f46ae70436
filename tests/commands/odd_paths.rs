//! Images, files and directories of the host whose names are not UTF-8.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use draconis_testkit::judge::assert_fsck_clean;

use crate::common::{Draconis, mke2fs};

fn joined(image: &Path, path: &[u8]) -> OsString {
    let mut target = image.as_os_str().to_owned();
    target.push(":/");
    target.push(OsStr::from_bytes(path));
    target
}

#[test]
fn commands_take_and_show_names_that_are_not_utf8() {
    let draconis = Draconis::new();
    let odd = |below: &[u8]| draconis.dir.path().join(OsStr::from_bytes(below));
    let (dir, image, file) = (odd(b"dir\xff"), odd(b"dir\xff/a\xff.img"), odd(b"dir\xff/file\xff"));
    std::fs::create_dir(&dir).unwrap();
    std::fs::write(&file, "contents").unwrap();
    mke2fs(&image, None, &["-t", "ext4"], "8M");
    let run_ok = |words: &[&OsStr]| {
        let output = draconis.run(words);
        let errors = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success() && errors.is_empty(), "{words:?}: {errors}");
        String::from_utf8(output.stdout).unwrap()
    };
    let fail = |words: &[&OsStr]| {
        let output = draconis.run(words);
        assert!(!output.status.success(), "{words:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    let copy = odd(b"copy\xff");
    let (top, inside) = (joined(&image, b""), joined(&image, b"file\xff"));
    run_ok(&["put".as_ref(), file.as_ref(), &top]);
    assert_eq!(run_ok(&["cat".as_ref(), &inside]), "contents");
    // For scripts, names are as they are.
    let listed = draconis.run(["ls".as_ref(), top.as_os_str()]);
    assert!(listed.stdout.starts_with(b"file\xff\n"), "{listed:?}");
    let listed: serde_json::Value =
        serde_json::from_str(&run_ok(&["ls".as_ref(), "--json".as_ref(), &inside])).unwrap();
    assert_eq!(listed[0]["name"], "file\\xff");
    assert_eq!(listed[0]["name_hex"], "66696c65ff");
    run_ok(&["get".as_ref(), &inside, copy.as_ref()]);
    assert_eq!(std::fs::read(&copy).unwrap(), b"contents");
    run_ok(&["check".as_ref(), image.as_ref()]);
    run_ok(&["info".as_ref(), image.as_ref()]);
    assert_fsck_clean(&image);

    let missing = odd(b"dir\xff/missing\xfe");
    let name = format!("{}/dir\\xff/missing\\xfe", draconis.dir.path().display());
    let in_missing = joined(&missing, b"");
    for words in [
        &["ls".as_ref(), in_missing.as_os_str()][..],
        &["check".as_ref(), missing.as_ref()],
        &["put".as_ref(), missing.as_ref(), &top],
        &["get".as_ref(), &in_missing, copy.as_ref()],
        &["store".as_ref(), "info".as_ref(), missing.as_ref()],
        &["mount".as_ref(), missing.as_ref(), dir.as_ref()],
    ] {
        let errors = fail(words);
        assert!(errors.contains(&name), "{words:?}: {errors}");
    }
    let errors = fail(&["cat".as_ref(), &joined(&image, b"none\xff")]);
    assert!(errors.contains("a\\xff.img:/none\\xff"), "{errors}");
    let other = odd(b"dir\xff/a\xfe.img");
    std::fs::copy(&image, &other).unwrap();
    let words = ["export", "-r", "--json", "--run", "true"].map(OsStr::new);
    let words: Vec<_> = words.into_iter().chain([image.as_ref(), other.as_ref()]).collect();
    let exported: serde_json::Value = serde_json::from_str(&run_ok(&words)).unwrap();
    for (nth, (name, path)) in [("a\\xff.img", &image), ("a\\xfe.img", &other)].iter().enumerate() {
        let export = &exported["exports"][nth];
        assert_eq!(export["name"], *name, "{exported}");
        assert!(export["image"].as_str().unwrap().ends_with(name), "{exported}");
        assert_eq!(export["image_hex"], hex(path), "{exported}");
    }
}

fn hex(path: &Path) -> String {
    path.as_os_str().as_bytes().iter().map(|byte| format!("{byte:02x}")).collect()
}
