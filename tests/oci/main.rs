//! Volumes from container images, compared with the kernel's overlayfs and checked by e2fsck.

#[path = "../common/mod.rs"]
mod common;

mod build;
mod hostile;
mod large;
mod odd;
mod options;
mod overlay;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{Draconis, FileProperties, IgnoredProperties, Kernel, scan_tree};

pub(crate) fn check(image: &Path) {
    let output = Command::new("e2fsck").arg("-fn").arg(image).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

/// Returns the comparable properties of a merged tree. Overlayfs still counts removed names as
/// links, and the root directory differs.
pub(crate) fn seen(top: &Path) -> BTreeMap<PathBuf, FileProperties> {
    let mut seen = scan_tree(top, IgnoredProperties { what_a_copy_loses: true, fractions: false });
    seen.remove(Path::new(""));
    seen.remove(Path::new("lost+found"));
    seen.values_mut().for_each(|one| one.links = 0);
    seen
}

/// Describes the tree in a volume as the kernel shows it.
pub(crate) fn in_volume(draconis: &Draconis, image: &Path) -> BTreeMap<PathBuf, FileProperties> {
    let kernel = Kernel::mount(image, draconis.make_dir("kernel"), "oci").unwrap();
    seen(&kernel.at)
}
