//! Corruption of a few bytes in metadata.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::OnceLock;

use draconis_device::Random;

use super::{Image, tree};

/// Returns the number of images: `usual` times `DRACONIS_ROUNDS`.
pub fn scaled_rounds(usual: u64) -> u64 {
    let times = std::env::var("DRACONIS_ROUNDS").ok().and_then(|times| times.parse().ok());
    usual * times.unwrap_or(1)
}

/// Small images of several kinds, made once.
pub fn base_images() -> &'static [Vec<u8>] {
    static BASES: OnceLock<Vec<Vec<u8>>> = OnceLock::new();
    BASES.get_or_init(|| {
        let source = tempfile::tempdir().unwrap();
        build_small_tree(source.path());
        let makes: [&[&str]; 5] = [
            &["-b", "1024", "-I", "256"],
            &["-b", "1024", "-I", "128", "-g", "256", "-O", "meta_bg,^resize_inode"],
            &["-b", "2048", "-I", "512", "-O", "sparse_super2,huge_file,large_file"],
            &["-b", "4096", "-I", "256", "-O", "^dir_index,^filetype"],
            &["-b", "1024", "-r", "0", "-O", "none"],
        ];
        makes
            .iter()
            .filter_map(|arguments| {
                let image = Image::make(Some(source.path()), "768k", arguments)?;
                super::run_tool("e2fsck", &["-fyD", image.path()])?;
                Some(std::fs::read(&image.path).unwrap())
            })
            .collect()
    })
}

/// Asserts that the peak memory of this process stayed small.
pub fn assert_peak_memory_is_small() {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM")).unwrap();
    let kib: u64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    assert!(kib < 192 << 10, "{kib} KiB");
}

/// Builds a small tree with one file of each kind.
pub fn build_small_tree(root: &Path) {
    for len in [0, 10, 1500, 14_000, 90_000] {
        std::fs::write(root.join(format!("f{len}")), tree::random_bytes(len as u64, len)).unwrap();
    }
    let sparse = std::fs::File::create(root.join("sparse")).unwrap();
    for at in [0, 300 << 10, 70 << 20] {
        sparse.write_all_at(b"data", at).unwrap();
    }
    std::os::unix::fs::symlink("short", root.join("fast")).unwrap();
    std::os::unix::fs::symlink("x/".repeat(200), root.join("slow")).unwrap();
    let attributed = root.join("attributed");
    std::fs::write(&attributed, b"x").unwrap();
    for (name, len) in [("user.a", 4), ("user.b", 300)] {
        let value = tree::random_bytes(1, len);
        let flags = rustix::fs::XattrFlags::empty();
        let _ = rustix::fs::setxattr(&attributed, name, &value, flags);
    }
    let many = root.join("many");
    std::fs::create_dir_all(many.join("below/it")).unwrap();
    for nth in 0..120 {
        let name = many.join(format!("a somewhat longer name {nth}"));
        std::fs::hard_link(&attributed, name).unwrap();
    }
}

/// Returns byte ranges where every field matters.
pub fn metadata_ranges(image: &[u8]) -> Vec<std::ops::Range<usize>> {
    metadata_ranges_of_inodes(image, &[1, 7, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21])
}

/// Returns [`structures`] for these inodes, counted from 0.
pub fn metadata_ranges_of_inodes(image: &[u8], inodes: &[usize]) -> Vec<std::ops::Range<usize>> {
    let le16 = |at: usize| u16::from_le_bytes(image[at..at + 2].try_into().unwrap());
    let le32 = |at: usize| u32::from_le_bytes(image[at..at + 4].try_into().unwrap()) as usize;
    let block = 1024 << le32(1024 + 0x18);
    let descriptors = block * (le32(1024 + 0x14) + 1);
    let inode = if le32(1024 + 0x4C) == 0 { 128 } else { usize::from(le16(1024 + 0x58)) };
    let table = le32(descriptors + 8) * block;
    let mut found = Vec::new();
    for _ in 0..8 {
        found.extend([1024..1024 + 0x180, 1024..1024 + 0x70, descriptors..descriptors + 64]);
    }
    for nth in inodes {
        let at = table + nth * inode;
        found.push(at..at + inode);
        // Blocks that it points to: data, directory, indirect or xattr blocks.
        for pointer in (40..100).step_by(4).chain([104]) {
            let start = le32(at + pointer) * block;
            if start > 0 && start + block <= image.len() {
                found.push(start..start + block);
                found.push(start..start + 64);
            }
        }
    }
    found
}

/// Writes a value that often breaks parsers.
pub fn corrupt_field(image: &mut [u8], range: std::ops::Range<usize>, random: &mut Random) {
    let width = [1, 2, 4, 4][random.next_below(4) as usize];
    let at = range.start + random.next_below((range.len() / width) as u64) as usize * width;
    let old =
        image[at..at + width].iter().rev().fold(0u64, |all, byte| all << 8 | u64::from(*byte));
    let new = match random.next_below(10) {
        0 => 0,
        1 => u64::MAX,
        2 => 1 << 31,
        3 => (1 << 31) - 1,
        4 => old.wrapping_add(1),
        5 => old.wrapping_sub(1),
        6 => old ^ (1 << random.next_below(8 * width as u64)),
        7 => random.next_below(800),
        8 => 1 << random.next_below(33),
        _ => random.next_u64(),
    };
    image[at..at + width].copy_from_slice(&new.to_le_bytes()[..width]);
}
