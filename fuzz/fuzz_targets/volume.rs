//! Any bytes as a volume: everything that can be read of it is read, within a bound.
#![no_main]

use std::sync::Arc;

use draconis_device::MemoryDisk;
use draconis_types::FileType;
use draconis_ext::{Cookie, InodeNumber, OpenOptions, Volume};
use libfuzzer_sys::fuzz_target;

/// Names and reads of one run.
const STEPS: usize = 2_000;
/// Bytes read of one file, from its start and before its end.
const PIECE_BYTES: usize = 64 << 10;

fuzz_target!(|bytes: &[u8]| {
    let disk = Arc::new(MemoryDisk::new(bytes.to_vec(), 512));
    let small = OpenOptions {
        inode_cache: 32,
        block_map_cache: 8,
        data_cache_bytes: 256 << 10,
        ..OpenOptions::default()
    };
    let Ok(volume) = Volume::open(disk, small) else { return };
    let _ = (volume.info(), volume.space(), volume.statistics());
    let mut stack = vec![volume.root()];
    let mut steps = 0;
    while let Some(number) = stack.pop() {
        steps += 1;
        if steps > STEPS {
            return;
        }
        look(&volume, number, &mut stack);
    }
});

fn look(volume: &Volume, number: InodeNumber, stack: &mut Vec<InodeNumber>) {
    let _ = volume.attributes(number);
    for name in volume.xattr_names(number).unwrap_or_default() {
        let _ = volume.xattr(number, &name);
    }
    let Ok(inode) = volume.inode(number) else { return };
    match inode.kind {
        FileType::Directory => {
            let mut names = vec![];
            let _ = volume.entries(number, Cookie::default(), true, |found| {
                if let Ok(entry) = found {
                    names.push((entry.name.to_vec(), entry.inode));
                }
                names.len() < 200
            });
            for (name, below) in names {
                let _ = volume.lookup(number, &name);
                if !matches!(&name[..], b"." | b"..") && stack.len() < STEPS {
                    stack.push(below);
                }
            }
        }
        FileType::Symlink => drop(volume.read_link(number)),
        _ => {
            let _ = volume.map(number, 0);
            let mut buffer = vec![0; PIECE_BYTES];
            for from in [0, inode.size_bytes.saturating_sub(PIECE_BYTES as u64 / 2)] {
                let _ = volume.read_into(number, from, &mut buffer);
            }
        }
    }
}
