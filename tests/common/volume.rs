//! A volume mounted read-write, and its checks afterwards.

use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::{Pid, Signal, kill_process};

use super::{
    Draconis, IgnoredProperties, KernelMount, assert_same_trees, mke2fs, mounts_below, scan_tree,
    wait_until,
};

/// A new volume, mounted read-write.
pub struct MountedVolume {
    pub draconis: Draconis,
    pub image: PathBuf,
    pub at: PathBuf,
    keeps_access_times: bool,
}

impl MountedVolume {
    pub fn new(block: &str, size: &str, options: &str) -> Self {
        Self::create_and_mount("ext2", block, size, options)
    }

    /// Creates and mounts a volume of type ext2, ext3 or ext4.
    pub fn create_and_mount(kind: &str, block: &str, size: &str, options: &str) -> Self {
        let draconis = Draconis::new();
        let image = draconis.path("volume.img");
        mke2fs(&image, None, &["-t", kind, "-b", block], size);
        let at = draconis.mount(&image, "at", options);
        let keeps_access_times = !options.contains("noatime");
        let volume = Self { draconis, image, at, keeps_access_times };
        let status = volume.draconis.status();
        assert_eq!(status["mounts"][0]["read_only"], false, "{status}");
        volume
    }

    pub fn at(&self, name: &str) -> PathBuf {
        self.at.join(name)
    }

    pub fn unmount(&self) {
        // A child of another test may hold our files between its fork and its exec.
        wait_until("it is not busy", || {
            let output = self.draconis.run(["umount".as_ref(), self.at.as_os_str()]);
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success() || said.contains("busy"), "{said}");
            output.status.success()
        });
    }

    /// Unmounts and checks the volume, and compares it with the kernel's view.
    pub fn unmount_and_check(&self) {
        if self.keeps_access_times {
            // The first look may change access times.
            scan_tree(&self.at, IgnoredProperties::default());
        }
        let seen = scan_tree(&self.at, IgnoredProperties::default());
        self.unmount();
        run_e2fsck(&self.image);
        let at = self.draconis.path("kernel");
        if let Some(kernel) = KernelMount::mount(&self.image, at, "comparing a changed volume") {
            assert_same_trees(&seen, &scan_tree(&kernel.at, IgnoredProperties::default()));
        }
    }

    /// Kills the worker, waits until the manager has noticed, and removes the dead mount.
    pub fn kill_worker(&self) {
        kill_process(self.worker_pid(), Signal::KILL).unwrap();
        wait_until("the loss is noticed", || {
            let mount = &self.draconis.status()["mounts"][0];
            mount["state"] == "dead"
                && mount["why"].as_str().is_some_and(|why| why.contains("signal 9"))
        });
        assert_eq!(mounts_below(&self.at), std::slice::from_ref(&self.at), "it stays in place");
        self.draconis.run_ok(["umount".as_ref(), self.at.as_os_str()]);
        assert!(mounts_below(&self.at).is_empty());
    }

    pub fn worker_pid(&self) -> Pid {
        let pid = self.draconis.status()["mounts"][0]["worker_pid"].as_i64().unwrap();
        Pid::from_raw(pid as i32).unwrap()
    }
}

/// Runs `e2fsck -fn`, which must report nothing.
pub fn run_e2fsck(image: &Path) {
    let said = draconis_testkit::judge::assert_fsck_clean(image);
    // Remarks are not damage, but are not accepted either.
    let remarks = said.lines().filter(|line| line.ends_with("? no") || line.contains("WARNING"));
    assert_eq!(remarks.count(), 0, "{said}");
}

pub fn run_ok(command: &mut Command) {
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {said}");
}

pub fn run_shell(script: &str, at: &Path) {
    run_ok(Command::new("sh").args(["-euc", script]).current_dir(at));
}
