//! Two mounts of copies of one image, and their comparison after unmounting.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::common::volume::run_e2fsck;
use crate::common::{
    self, Draconis, IgnoredProperties, KernelMount, mke2fs, report_skipped, scan_tree, wait_until,
};

pub struct MountPair {
    /// Dropped first: its mount point is in the other's directory.
    kernel: Option<KernelMount>,
    draconis: Draconis,
    images: [PathBuf; 2],
    /// File system type of both volumes.
    kind: &'static str,
    pub ours: PathBuf,
    pub theirs: PathBuf,
}

/// Returns true if mounts can be compared here; otherwise reports the test as skipped.
pub fn can_compare_mounts(test: &str) -> bool {
    if !common::is_root() {
        report_skipped(format_args!("{test} needs root, for the kernel's own mount"));
        return false;
    }
    common::has_fuse(test)
}

impl MountPair {
    /// Creates two empty volumes of a type.
    pub fn new(kind: &'static str, block: &str, size: &str, options: &str) -> Self {
        Self::with_injected_fault(kind, block, size, options, None)
    }

    /// Creates two volumes, and injects a fault into our mount.
    pub fn with_injected_fault(
        kind: &'static str,
        block: &str,
        size: &str,
        options: &str,
        leaves_out: Option<String>,
    ) -> Self {
        let mut draconis = Draconis::new();
        draconis.leaves_out = leaves_out;
        let images = ["ours.img", "theirs.img"].map(|name| draconis.path(name));
        let arguments = ["-t", kind, "-b", block, "-i", "4096", "-m", "0"];
        mke2fs(&images[0], None, &arguments, size);
        let copied = Command::new("cp").arg("--sparse=always").args(&images).status().unwrap();
        assert!(copied.success());
        Self::mount(draconis, kind, images, options)
    }

    fn mount(draconis: Draconis, kind: &'static str, images: [PathBuf; 2], options: &str) -> Self {
        let ours = draconis.mount(&images[0], "ours", options);
        let theirs = draconis.make_dir("theirs");
        let mounted = Command::new("mount")
            .args(["-t", kind, "-o", &format!("loop,{options}")])
            .args([&images[1], &theirs])
            .output()
            .unwrap();
        assert!(mounted.status.success(), "{}", String::from_utf8_lossy(&mounted.stderr));
        let kernel = Some(KernelMount { at: theirs.clone() });
        Self { draconis, images, kind, ours, theirs, kernel }
    }

    /// Remounts both with other options.
    pub fn remount(mut self, options: &str) -> Self {
        self.unmount();
        let draconis = std::mem::replace(&mut self.draconis, Draconis::new());
        Self::mount(draconis, self.kind, self.images.clone(), options)
    }

    fn unmount(&mut self) {
        wait_until("ours is not busy", || {
            let output = self.draconis.run(["umount".as_ref(), self.ours.as_os_str()]);
            output.status.success()
        });
        self.kernel = None;
    }

    /// Unmounts and checks both volumes. Each must show what its mount showed. Both must have the
    /// same files, times aside, except in directories known to differ.
    pub fn check_and_compare(mut self, different: &BTreeSet<String>) {
        // Drops the caches, to see the volume's state: cached state is compared call by call.
        // The sync may report a failed write-back again.
        for at in [&self.ours, &self.theirs] {
            let _ = Command::new("sync").arg("-f").arg(at).stderr(Stdio::null()).status();
        }
        std::fs::write("/proc/sys/vm/drop_caches", "3").unwrap();
        let shown = [&self.ours, &self.theirs]
            .map(|at| clear_access_times(scan_tree(at, IgnoredProperties::default())));
        self.unmount();
        for image in &self.images {
            run_e2fsck(image);
        }
        let mut kept = vec![];
        for (image, shown) in self.images.iter().zip(&shown) {
            let at = self.draconis.path("unmounted");
            let kernel =
                KernelMount::mount(image, at, "comparing volumes").expect("it was mounted");
            let found = clear_access_times(scan_tree(&kernel.at, IgnoredProperties::default()));
            common::assert_same_trees(shown, &found);
            kept.push((found, list_inode_flags(&kernel.at)));
        }
        let [ours, theirs] = [0, 1].map(|i| remove_volume_specifics(&kept[i].0, different));
        assert!(!ours.is_empty());
        common::assert_same_trees(&ours, &theirs);
        let [ours, theirs] = [0, 1].map(|i| {
            let is_alike = |line: &&String| {
                let top = line.split("./").nth(1).and_then(|path| path.split('/').next());
                !different.contains(top.unwrap_or_default())
            };
            kept[i].1.iter().filter(is_alike).cloned().collect::<Vec<_>>()
        });
        assert!(ours == theirs, "lsattr: {ours:#?} and {theirs:#?}");
    }
}

/// Removes access times, which looking changes.
fn clear_access_times(
    mut seen: BTreeMap<PathBuf, common::FileProperties>,
) -> BTreeMap<PathBuf, common::FileProperties> {
    for one in seen.values_mut() {
        one.times[0] = (0, 0);
    }
    seen
}

/// Removes what depends on the volume: inode numbers, times, sizes of directories.
fn remove_volume_specifics(
    seen: &BTreeMap<PathBuf, common::FileProperties>,
    different: &BTreeSet<String>,
) -> BTreeMap<PathBuf, common::FileProperties> {
    let top = |path: &Path| path.iter().next().map(|top| top.to_string_lossy().into_owned());
    let one = |(path, seen): (&PathBuf, &common::FileProperties)| {
        let mut seen = seen.clone();
        seen.inode = 0;
        seen.times = [(0, 0); 3];
        if seen.mode & libc::S_IFMT == libc::S_IFDIR {
            (seen.size, seen.blocks) = (0, 0);
        }
        (path.clone(), seen)
    };
    let alike =
        seen.iter().filter(|(path, _)| top(path).is_none_or(|top| !different.contains(&top)));
    alike.map(one).collect()
}

fn list_inode_flags(at: &Path) -> Vec<String> {
    let output = Command::new("lsattr").args(["-R", "-a", "."]).current_dir(at).output().unwrap();
    let mut lines: Vec<_> =
        String::from_utf8_lossy(&output.stdout).lines().map(String::from).collect();
    lines.retain(|line| line.starts_with('-') || line.contains(" ./"));
    lines.sort();
    lines
}
