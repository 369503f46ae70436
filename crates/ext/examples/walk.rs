//! Walks an image, reads everything in it, and says what that cost.
//!
//! `walk IMAGE [PASSES] [direct] [uring] [inodes]`: the first pass is cold as far as this
//! process is concerned; `direct` goes past the page cache, so that it is cold altogether;
//! `inodes` reads the files of a directory in the order of their numbers.

use std::hash::{DefaultHasher, Hasher};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use draconis_device::{FileDisk, FileOptions};
use draconis_exchange::contract::Kind;
use draconis_ext::{Cookie, InodeNumber, Options, Volume};

#[derive(Default)]
struct Seen {
    names: u64,
    bytes: u64,
    damaged: u64,
    sum: DefaultHasher,
}

fn walk(volume: &Volume, contents: bool) -> Seen {
    let mut seen = Seen::default();
    let mut directories = vec![volume.root()];
    let mut known = std::collections::HashSet::new();
    while let Some(dir) = directories.pop() {
        let mut files: Vec<InodeNumber> = Vec::new();
        let listed = volume.entries(dir, Cookie::default(), false, |entry| {
            match entry {
                Ok(entry) => {
                    seen.names += 1;
                    seen.sum.write(entry.name);
                    files.push(entry.inode);
                }
                Err(_) => seen.damaged += 1,
            }
            true
        });
        seen.damaged += u64::from(listed.is_err());
        for number in files {
            let Ok(inode) = volume.inode(number) else {
                seen.damaged += 1;
                continue;
            };
            match inode.kind {
                Kind::Directory if known.insert(number) => directories.push(number),
                Kind::File if contents => {
                    let mut at = 0;
                    loop {
                        match volume.read_of(&inode, at, 1 << 20) {
                            Ok(data) if data.is_empty() => break,
                            Ok(data) => {
                                at += data.len() as u64;
                                seen.sum.write_u64(sum(&data));
                            }
                            Err(_) => {
                                seen.damaged += 1;
                                break;
                            }
                        }
                    }
                    seen.bytes += at;
                }
                _ => {}
            }
        }
    }
    seen
}

fn sum(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<8>();
    let sum = words.iter().fold(0u64, |sum, word| sum.wrapping_add(u64::from_le_bytes(*word)));
    rest.iter().fold(sum, |sum, byte| sum.wrapping_add(u64::from(*byte)))
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().expect("usage: walk IMAGE [PASSES]");
    let passes: u32 = arguments.next().map_or(2, |passes| passes.parse().expect("a number"));
    let flags: Vec<String> = arguments.collect();
    let has = |flag: &str| flags.iter().any(|it| it == flag);
    let options = FileOptions { write: false, direct: has("direct"), uring: has("uring") };
    let disk = FileDisk::open(Path::new(&path), options).expect("the image opens");
    let volume = match Volume::open(Arc::new(disk), Options::default()) {
        Ok(volume) => volume,
        Err(error) => {
            eprintln!("{path}: {error}");
            std::process::exit(1);
        }
    };
    for contents in [false, true] {
        for pass in 0..passes {
            let before = volume.statistics().device;
            let start = Instant::now();
            let seen = walk(&volume, contents);
            let seconds = start.elapsed().as_secs_f64();
            let after = volume.statistics().device;
            println!(
                "{} pass {pass}: {} names, {} damaged, {:.1} MB in {:.3} s: {:.0} MB/s, {:.0} names/s; \
                 {} device reads, {:.1} MB; sum {:016x}",
                if contents { "read" } else { "stat" },
                seen.names,
                seen.damaged,
                seen.bytes as f64 / 1e6,
                seconds,
                seen.bytes as f64 / 1e6 / seconds,
                seen.names as f64 / seconds,
                after.reads - before.reads,
                (after.bytes - before.bytes) as f64 / 1e6,
                seen.sum.finish(),
            );
        }
    }
    println!("{:#?}", volume.statistics());
}
