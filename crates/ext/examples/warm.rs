//! Warm reads of 16 KiB: this library beside the kernel's `read` from the page cache.
//!
//! `warm IMAGE NAME FILE`: `NAME` in the root of `IMAGE` holds what the host's `FILE` holds.

use std::fs::File;
use std::hint::black_box;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Instant;

use draconis_device::MemoryDisk;
use draconis_ext::{Options, Volume};

const STEP: usize = 16 << 10;

fn time(what: &str, reads: u64, mut pass: impl FnMut()) -> f64 {
    let mut best = f64::MAX;
    for _ in 0..5 {
        let start = Instant::now();
        pass();
        best = best.min(start.elapsed().as_secs_f64());
    }
    let nanoseconds = best * 1e9 / reads as f64;
    println!("{what}: {nanoseconds:.0} ns a read, {:.1} GB/s", STEP as f64 / nanoseconds);
    nanoseconds
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [image, name, host] = arguments.as_slice() else { panic!("usage: warm IMAGE NAME FILE") };
    let disk = MemoryDisk::new(std::fs::read(image).expect("the image opens"), 512);
    let options = Options { data_cache_bytes: 1 << 30, ..Options::default() };
    let volume = Volume::open(Arc::new(disk), options).expect("the image is a volume");
    let number = volume.lookup(volume.root(), name.as_bytes()).expect("the name is there");
    let inode = volume.inode(number).expect("so is its inode");
    let file = File::open(host).expect("the file opens");
    let size = inode.size_bytes;
    let reads = size / STEP as u64;
    let mut buffer = vec![0; STEP];

    let kernel = time("kernel pread", reads, || {
        for nth in 0..reads {
            black_box(file.read_at(&mut buffer, nth * STEP as u64).expect("a read"));
        }
    });
    let shared = time("library, shared", reads, || {
        for nth in 0..reads {
            black_box(volume.read_of(&inode, nth * STEP as u64, STEP).expect("a read").len());
        }
    });
    let numbered = time("library, shared, by number", reads, || {
        for nth in 0..reads {
            black_box(volume.read(number, nth * STEP as u64, STEP).expect("a read").len());
        }
    });
    let copied = time("library, copied", reads, || {
        for nth in 0..reads {
            let at = nth * STEP as u64;
            black_box(volume.read_into_of(&inode, at, &mut buffer).expect("a read"));
        }
    });
    println!(
        "ratio to the kernel: shared {:.1}, by number {:.1}, copied {:.1}",
        kernel / shared,
        kernel / numbered,
        kernel / copied
    );
}
