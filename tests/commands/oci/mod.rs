//! Volumes from container images, compared with the kernel's overlayfs and checked by e2fsck.

mod build;
mod hostile;
mod large;
mod odd;
mod options;
mod overlay;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::common::{Draconis, FileProperties, IgnoredProperties, KernelMount, scan_tree};

/// Returns the comparable properties of a merged tree. Overlayfs still counts removed names as
/// links, and the root directory differs.
pub(crate) fn merged_tree_properties(top: &Path) -> BTreeMap<PathBuf, FileProperties> {
    let mut seen = scan_tree(top, IgnoredProperties { what_a_copy_loses: true, fractions: false });
    seen.remove(Path::new(""));
    seen.remove(Path::new("lost+found"));
    seen.values_mut().for_each(|one| one.links = 0);
    seen
}

/// Describes the tree in a volume as the kernel shows it.
pub(crate) fn volume_tree_properties(
    draconis: &Draconis,
    image: &Path,
) -> BTreeMap<PathBuf, FileProperties> {
    let kernel = KernelMount::mount(image, draconis.make_dir("kernel"), "oci").unwrap();
    merged_tree_properties(&kernel.at)
}
