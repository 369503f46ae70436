//! Copies on the host, by `get`, `rescue`, `undelete` and `tar`: attributes that the host refuses,
//! and files that never have their name while they are not whole.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::{Draconis, has_root, has_tool};

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

/// Returns what of a copied file must be right whoever owns it.
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
