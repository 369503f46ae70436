//! Stores on a real block device, and zero-filled files. Devices need root and a loop device;
//! skipped tests are reported.

use crate::common;

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::{Draconis, report_skipped};

/// A loop device on a file, detached on drop.
struct LoopDevice(PathBuf);

impl LoopDevice {
    fn attach(file: &Path, test: &str) -> Option<Self> {
        let made = Command::new("losetup").args(["-f", "--show"]).arg(file).output();
        match made {
            Ok(made) if made.status.success() => {
                Some(Self(String::from_utf8(made.stdout).unwrap().trim().into()))
            }
            _ => {
                report_skipped(format_args!("{test} needs root and a loop device"));
                None
            }
        }
    }

    fn name(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("-d").arg(&self.0).status();
    }
}

fn allocated_bytes(file: &Path) -> u64 {
    std::fs::metadata(file).unwrap().blocks() * 512
}

/// Writes a profile to a file, to avoid measuring.
fn write_profile(draconis: &Draconis) -> String {
    let path = draconis.path("profile");
    let profile =
        r#"{"layout": "cow", "page_bytes": 4096, "segment_bytes": 262144, "queue_depth": 8}"#;
    std::fs::write(&path, profile).unwrap();
    path.to_str().unwrap().to_owned()
}

fn run(program: &str, arguments: &[&str]) {
    let status = Command::new(program).args(arguments).status().unwrap();
    assert!(status.success(), "{program} {arguments:?}");
}

#[test]
fn a_device_is_touched_only_by_who_says_so() {
    let draconis = Draconis::new();
    let file = draconis.path("disk");
    std::fs::File::create(&file).unwrap().set_len(64 << 20).unwrap();
    let test = "a_device_is_touched_only_by_who_says_so";
    let Some(device) = LoopDevice::attach(&file, test) else { return };
    let device = device.name();
    for command in [&["store", "probe", device][..], &["store", "create", device]] {
        let errors = draconis.run_failing(command);
        assert!(errors.contains("--destroy"), "{errors}");
        let errors = draconis.run(command);
        assert!(!errors.status.success());
    }
    // Nothing was written, not even for detection.
    assert_eq!(allocated_bytes(&file), 0);

    run("mke2fs", &["-q", "-F", "-t", "ext2", device]);
    let errors = draconis.run_failing(["store", "create", "--force", device]);
    assert!(
        errors.contains("holds an ext file system") && errors.contains("--destroy"),
        "{errors}"
    );
    let errors = draconis.run_failing(["store", "probe", device]);
    assert!(
        errors.contains("holds an ext file system") && errors.contains("--destroy"),
        "{errors}"
    );
    let at = draconis.make_dir("mounted");
    run("mount", &[device, at.to_str().unwrap()]);
    let held = common::KernelMount { at };
    for command in ["probe", "create"] {
        let errors = draconis.run_failing(["store", command, "--destroy", device]);
        assert!(errors.contains("in use; unmount it first"), "{errors}");
    }
    drop(held);
    run("e2fsck", &["-fn", device]);

    let printed = draconis.run_ok(["store", "probe", "--destroy", "--json", device]);
    let probed: serde_json::Value = serde_json::from_str(&printed).unwrap();
    assert!(probed["measured"]["write_bytes_per_s"].as_u64().unwrap() > 0, "{printed}");
    let errors = draconis.run_failing(["store", "create", "--destroy", "--size", "32M", device]);
    assert!(errors.contains("takes all of a device"), "{errors}");
    let printed = draconis.run_ok(["store", "create", "--destroy", device]);
    assert!(printed.contains("64.0 MiB, layout "), "{printed}");
    assert!(printed.contains("queue depth "), "{printed}");
    let errors = draconis.run_failing(["store", "create", device]);
    assert!(errors.contains("holds a store; --destroy"), "{errors}");
    assert!(draconis.run_ok(["store", "info", device]).contains("64.0 MiB"));
    draconis.run_ok(["kv", "put", device, "key", "value"]);
    assert_eq!(draconis.run_ok(["kv", "get", device, "key"]), "value");
    draconis.run_ok(["store", "check", device]);
}

#[test]
fn what_a_store_needs_no_more_is_discarded() {
    let draconis = Draconis::new();
    let (file, large) = (draconis.path("disk"), draconis.path("large"));
    std::fs::File::create(&file).unwrap().set_len(64 << 20).unwrap();
    let test = "what_a_store_needs_no_more_is_discarded";
    let Some(device) = LoopDevice::attach(&file, test) else { return };
    let device = device.name();
    draconis.run_ok([
        "store",
        "create",
        "--destroy",
        device,
        "--profile",
        &write_profile(&draconis),
    ]);
    let used = || {
        run("sync", &[file.to_str().unwrap()]);
        allocated_bytes(&file)
    };
    let bytes: Vec<u8> = (0..20_000_000u32).map(|at| (at.wrapping_mul(at) >> 9) as u8).collect();
    std::fs::write(&large, bytes).unwrap();
    let large = large.to_str().unwrap();
    let put = || draconis.run_ok(["store", "put", device, "new", large]).trim().to_owned();
    let (one, other) = (put(), put());
    let before = used();
    draconis.run_ok(["store", "rm", device, &one, &other]);
    // A checkpoint without them is durable before they are discarded.
    draconis.run_ok(["kv", "put", device, "a", "b"]);
    draconis.run_ok(["kv", "put", device, "a", "c"]);
    let after = used();
    assert!(after + (30 << 20) < before, "{before} bytes of the file below, then {after}");
    draconis.run_ok(["store", "check", device]);
}

#[test]
fn store_file_is_preallocated_unless_sparse() {
    let draconis = Draconis::new();
    let profile = write_profile(&draconis);
    let large = draconis.path("large");
    std::fs::write(&large, vec![0x5A; 12 << 20]).unwrap();
    let large = large.to_str().unwrap();
    let (dense, sparse) = (draconis.path("dense"), draconis.path("sparse"));
    for (store, more) in [(&dense, &[][..]), (&sparse, &["--sparse"])] {
        let name = store.to_str().unwrap();
        let made = ["store", "create", name, "--size", "32M", "--profile"];
        draconis.run_ok([&made[..], &[&profile], more].concat());
        let len = std::fs::metadata(store).unwrap().len();
        assert_eq!(len, 32 << 20);
        let made = allocated_bytes(store);
        assert_eq!(made >= len, more.is_empty(), "{made} bytes of {len} are there");
        let id = draconis.run_ok(["store", "put", name, "new", large]);
        let full = allocated_bytes(store);
        draconis.run_ok(["store", "rm", name, id.trim()]);
        draconis.run_ok(["kv", "put", name, "a", "b"]);
        draconis.run_ok(["kv", "put", name, "a", "c"]);
        let less = allocated_bytes(store);
        // A zero-filled store is not punched; a sparse one is.
        assert_eq!(less >= len, more.is_empty(), "{less} bytes of {len} are there");
        assert_eq!(less + (8 << 20) < full, !more.is_empty(), "{full}, then {less}");
        draconis.run_ok(["store", "check", name]);
    }
}
