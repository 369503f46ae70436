//! Any bytes written over the metadata and the journal of a small volume with deleted files: what is
//! found of them is read, within a bound, also as a volume of its own.
//!
//! ```text
//!   | place (3) | byte | place (3) | byte | ..      a place counts the bytes of blocks with anything
//! ```
#![no_main]

use std::sync::{Arc, OnceLock};

use draconis_device::MemoryDisk;
use draconis_ext::{Cookie, FileSystem, FileType, OpenOptions, Volume};
use draconis_ext::undelete::{DeletedFiles, Limits};
use libfuzzer_sys::fuzz_target;

const BLOCK: usize = 1024;
const VOLUME_BYTES: u64 = 8 << 20;

/// The volume, and its blocks that are not zeros.
fn base() -> &'static (Vec<u8>, Vec<usize>) {
    static BASE: OnceLock<(Vec<u8>, Vec<usize>)> = OnceLock::new();
    BASE.get_or_init(|| {
        let dir = std::env::temp_dir().join(format!("undelete-fuzz-{}", std::process::id()));
        let fs = FileSystem::create(&dir, VOLUME_BYTES).expect("a volume");
        fs.create_dir_all("/top/below").expect("directories");
        for (nth, len) in [0usize, 50, 3000, 20_000].into_iter().enumerate() {
            fs.write(format!("/top/below/file-{nth}"), vec![nth as u8 + 1; len]).expect("a file");
        }
        fs.symlink("target", "/top/link").expect("a link");
        fs.sync().expect("durable");
        for nth in 0..4 {
            fs.remove_file(format!("/top/below/file-{nth}")).expect("it is there");
        }
        fs.remove_file("/top/link").expect("it is there");
        fs.remove_dir("/top/below").expect("it is empty");
        fs.close().expect("closed");
        let bytes = std::fs::read(&dir).expect("the image");
        let _ = std::fs::remove_file(&dir);
        let used = bytes.chunks(BLOCK).enumerate();
        let used = used.filter(|(_, block)| block.iter().any(|byte| *byte != 0));
        let used = used.map(|(nth, _)| nth * BLOCK).collect();
        (bytes, used)
    })
}

fuzz_target!(|bytes: &[u8]| {
    let (mut image, used) = base().clone();
    for change in bytes.chunks_exact(4) {
        let &[a, b, c, byte] = change else { continue };
        let place = usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c);
        image[used[place / BLOCK % used.len()] + place % BLOCK] = byte;
    }
    let disk = Arc::new(MemoryDisk::new(image, 512));
    let limits = Limits { max_files: 1000, max_runs: 10_000, max_names: 10_000 };
    let Ok(found) = DeletedFiles::scan(disk, limits) else { return };
    let mut into = vec![0; 1 << 16];
    for file in found.files() {
        let _ = (found.xattrs(file), file.link_target(&found));
        for range in file.data_ranges(found.block_bytes()).into_iter().take(8) {
            let _ = found.read(file, range.start, &mut into);
        }
    }
    let Ok(view) = found.into_view() else { return };
    let volume = Volume::open(view.disk, OpenOptions::default()).expect("a volume made just now");
    assert_eq!(volume.quick_check(), None);
    let (mut dirs, mut files) = (vec![volume.root()], vec![]);
    while let Some(dir) = dirs.pop() {
        let listed = volume.entries(dir, Cookie::default(), false, |entry| {
            let entry = entry.expect("a directory made just now");
            match entry.kind {
                Some(FileType::Directory) => dirs.push(entry.inode),
                _ => files.push(entry.inode),
            }
            true
        });
        listed.expect("a directory made just now");
    }
    for inode in files.into_iter().take(200) {
        volume.attributes(inode).expect("an inode made just now");
        let _ = (volume.xattr_names(inode), volume.read_link(inode), volume.read(inode, 0, 1 << 16));
    }
});
