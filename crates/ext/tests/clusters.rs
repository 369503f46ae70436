//! Volumes with clusters, filled by us and by the kernel: both hold the same amount.

use std::fs;
use std::sync::Arc;

use crate::common::FILE;
use crate::common::storm::write_options;
use crate::common::{Image, run_tool};
use draconis_device::{FileDisk, FileOptions};
use draconis_ext::{OpenOptions, Volume};

/// Adds a fixed hash seed.
fn with_hash_seed<'a>(arguments: &[&'a str]) -> Vec<&'a str> {
    let mut all = arguments.to_vec();
    all.extend(["-E", "hash_seed=01234567-89ab-cdef-0123-456789abcdef"]);
    all
}

fn file_name(nth: u64) -> String {
    format!("{nth}{}", "n".repeat(150))
}

/// Of two sizes, the second is that of all but the first file.
fn file_size(sizes: &[usize], nth: u64) -> usize {
    match sizes {
        [first, rest] => *(if nth == 0 { first } else { rest }),
        sizes => sizes[nth as usize % sizes.len()],
    }
}

/// Files that fit, their bytes, and the free blocks left.
type FillResult = (u64, u64, u64);

fn fill_with_draconis(image: &Image, sizes: &[usize], step: usize) -> FillResult {
    let file = fs::OpenOptions::new().read(true).write(true).open(&image.path).unwrap();
    let options = FileOptions { write: true, direct: false, uring: false };
    let disk = Arc::new(FileDisk::from_fd(file.into(), options).unwrap());
    let volume = Volume::open_for_writing(disk, OpenOptions::default(), write_options()).unwrap();
    let (mut files, mut bytes) = (0, 0);
    'full: loop {
        let name = file_name(files);
        let Ok(node) = volume.create(volume.root(), name.as_bytes(), &FILE) else { break };
        let size = file_size(sizes, files);
        files += 1;
        let mut at = 0;
        while at < size {
            let len = step.min(size - at);
            match volume.write(node, at as u64, &vec![7; len]) {
                Ok(written) if written == len => {}
                other => {
                    bytes += other.unwrap_or(0) as u64;
                    match sizes {
                        // The rest is filled with names.
                        [_, 0] => break,
                        _ => break 'full,
                    }
                }
            }
            (at, bytes) = (at + len, bytes + len as u64);
        }
    }
    volume.sync().unwrap();
    let free = volume.space().free_blocks;
    volume.close().unwrap();
    (files, bytes, free)
}

fn fill_with_kernel(image: &Image, sizes: &[usize], step: usize) -> Option<FillResult> {
    use std::io::Write;
    let mount = image.mount_writable()?;
    let (mut files, mut bytes) = (0, 0);
    'full: loop {
        let Ok(mut file) = fs::File::create(mount.path().join(file_name(files))) else {
            break;
        };
        let size = file_size(sizes, files);
        files += 1;
        let mut at = 0;
        while at < size {
            let len = step.min(size - at);
            match file.write(&vec![7; len]) {
                Ok(written) if written == len => {}
                other => {
                    bytes += other.unwrap_or(0) as u64;
                    match sizes {
                        // The rest is filled with names.
                        [_, 0] => break,
                        _ => break 'full,
                    }
                }
            }
            (at, bytes) = (at + len, bytes + len as u64);
        }
    }
    rustix::fs::sync();
    let free = rustix::fs::statvfs(mount.path()).unwrap().f_bfree;
    Some((files, bytes, free))
}

#[test]
#[ignore = "long: half a minute: fills volumes beside the kernel"]
fn as_many_files_fit_as_with_kernel() {
    for arguments in [
        &["-t", "ext4", "-b", "1024", "-C", "16384", "-N", "3000", "-O", "bigalloc"][..],
        &["-t", "ext4", "-b", "4096", "-C", "16384", "-N", "3000", "-O", "bigalloc"],
        &["-t", "ext4", "-b", "1024", "-C", "16384", "-N", "3000", "-O", "bigalloc,^has_journal"],
    ] {
        for (sizes, step) in [
            (&[100usize][..], 100),
            (&[20_000], 20_000),
            (&[100, 5000, 40_000, 17_000, 0], 1000),
            (&[1 << 30], 1000),
            (&[1 << 30], 1 << 20),
            (&[19 << 20, 0], 1000),
        ] {
            let Some(image) = Image::make(None, "20M", &with_hash_seed(arguments)) else { return };
            let copy = Image::from_bytes(&fs::read(&image.path).unwrap());
            let ours = fill_with_draconis(&copy, sizes, step);
            assert!(run_tool("e2fsck", &["-fn", copy.path()]).is_some());
            let Some(theirs) = fill_with_kernel(&image, sizes, step) else { return };
            let what = format!("{arguments:?} {sizes:?} {step}: {ours:?} {theirs:?}");
            eprintln!("{what}");
            // The kernel does not write part of a large write, and its names use the last block of
            // the directory's cluster. If that grows, one of the two has a cluster more for files.
            let one = (step as u64).max(2 * 16_384);
            assert!(ours.1 + one >= theirs.1, "{what}");
            assert!(ours.2 <= theirs.2 + 16, "{what}");
            if sizes.last() == Some(&0) && sizes.len() == 2 {
                assert!(ours.0 * 2 >= theirs.0, "{what}");
            } else {
                assert!(ours.0.abs_diff(theirs.0) <= 2, "{what}");
            }
        }
    }
}
