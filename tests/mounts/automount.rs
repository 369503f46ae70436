//! Mounts over automount points of autofs, which systemd makes for `x-systemd.automount`.

use std::process::Command;

use crate::common::{Draconis, has_fuse, has_root, has_tool, mke2fs, mounts_below, report_skipped};

/// An automounter: mounts autofs on `$3`, lets a process look into the directory, and answers the
/// request of the kernel by mounting there. Only its process group may pass meanwhile.
const AUTOMOUNTER: &str = r#"
import ctypes, fcntl, os, struct, subprocess, sys
program, image, point = sys.argv[1:]
READY, FAIL, CATATONIC = 0x9360, 0x9361, 0x9362
libc = ctypes.CDLL(None, use_errno=True)
requests, kernel = os.pipe()
os.setpgid(0, 0)
options = f"fd={kernel},pgrp={os.getpgrp()},minproto=5,maxproto=5,direct"
if libc.mount(b"test", point.encode(), b"autofs", 0, options.encode()):
    sys.exit("cannot mount autofs")
os.close(kernel)
control = os.open(point, os.O_RDONLY | os.O_DIRECTORY)
try:
    reader = subprocess.Popen(["cat", point + "/hello"], process_group=0, stdout=subprocess.PIPE)
    token = struct.unpack_from("I", os.read(requests, 304), 8)[0]
    mounted = subprocess.run([program, "mount", image, point])
    fcntl.ioctl(control, READY if mounted.returncode == 0 else FAIL, token)
    print(reader.communicate()[0].decode(), end="")
    if mounted.returncode == 0:
        subprocess.run([program, "umount", point], check=True)
finally:
    fcntl.ioctl(control, CATATONIC, 0)
    os.close(control)
    os.close(requests)
    subprocess.run(["umount", point], check=True)
"#;

#[test]
fn volume_mounts_over_an_automount_point() {
    let test = "mounting over an automount point";
    if !has_root(test) || !has_fuse(test) || !has_tool(test, "python3") {
        return;
    }
    let known = std::fs::read_to_string("/proc/filesystems").unwrap();
    if !known.lines().any(|line| line.ends_with("\tautofs")) {
        report_skipped("the kernel has no autofs");
        return;
    }
    let draconis = Draconis::new();
    let tree = draconis.make_dir("tree");
    std::fs::write(tree.join("hello"), "hello\n").unwrap();
    let image = draconis.path("a.img");
    mke2fs(&image, Some(&tree), &["-t", "ext2"], "8M");
    let at = draconis.make_dir("at");
    let mut automounter = Command::new("python3");
    automounter.args(["-c", AUTOMOUNTER, crate::common::program()]).args([&image, &at]);
    automounter.env("DRACONIS_RUNTIME_DIR", draconis.make_dir("run"));
    let ended = automounter.output().unwrap();
    let errors = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.success(), "{errors}");
    assert_eq!(String::from_utf8_lossy(&ended.stdout), "hello\n", "{errors}");
    assert!(mounts_below(&at).is_empty());
    crate::common::volume::run_e2fsck(&image);
}
