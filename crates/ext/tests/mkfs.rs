//! Volumes that we make, beside those of `mke2fs`, and as others see them.

mod common;

use std::path::Path;
use std::process::Command;

use common::{Image, run};
use draconis_device::{FileDisk, FileOptions};
use draconis_exchange::contract::Time;
use draconis_ext::mkfs::{self, Contents, Inodes, Layout, Node, Options, Plan, Target, Tree, What};

const UUID: &str = "11111111-2222-3333-4444-555555555555";
const SEED: &str = "01234567-89ab-cdef-0123-456789abcdef";
const TIME: u32 = 1_700_000_000;

struct Nothing;

impl Contents for Nothing {
    fn read(&self, _: u64, _: u64, _: &mut [u8]) -> std::io::Result<()> {
        Err(std::io::ErrorKind::NotFound.into())
    }
}

fn uuid(text: &str) -> [u8; 16] {
    let digits: Vec<u8> = text.bytes().filter(|byte| *byte != b'-').collect();
    let nibble = |byte: u8| char::from(byte).to_digit(16).unwrap() as u8;
    std::array::from_fn(|nth| nibble(digits[2 * nth]) << 4 | nibble(digits[2 * nth + 1]))
}

fn options() -> Options {
    Options { uuid: uuid(UUID), hash_seed: uuid(SEED), time: TIME, ..Options::default() }
}

fn root() -> Tree {
    let time = Time { seconds: i64::from(TIME), nanoseconds: 0 };
    Tree::new(Node::new(What::Directory, 0o755).at(time))
}

/// Writes a plan into a fresh file.
fn write(plan: &Plan<'_>, contents: &dyn Contents, path: &Path) -> mkfs::Result<()> {
    let file = std::fs::File::create(path).unwrap();
    file.set_len(plan.layout().len_bytes()).unwrap();
    let options = FileOptions { write: true, direct: false, uring: false };
    let disk = FileDisk::open(path, options).unwrap();
    mkfs::write(plan, contents, &Target { disk: &disk, zeroed: true, progress: &|_| {} })
}

/// The arguments of `mke2fs` as options.
fn parse(arguments: &str) -> Options {
    let mut options = options();
    let mut words = arguments.split_whitespace();
    while let Some(flag) = words.next() {
        let value = words.next().unwrap();
        match flag {
            "-b" => options.block_bytes = Some(value.parse().unwrap()),
            "-I" => options.inode_bytes = value.parse().unwrap(),
            "-i" => options.inodes = Inodes::PerBytes(value.parse().unwrap()),
            "-N" => options.inodes = Inodes::Count(value.parse().unwrap()),
            "-L" => options.label = value.into(),
            "-O" => options.features(value).unwrap(),
            "-m" => options.reserved_ppm = (value.parse::<f64>().unwrap() * 10_000.0) as u32,
            other => panic!("{other}"),
        }
    }
    options
}

/// What mke2fs makes of the same arguments, or `None` if it refuses; `size` in KiB.
fn theirs(arguments: &str, size: u64) -> Option<Image> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    let extended = format!("hash_seed={SEED},root_owner=0:0");
    let output = Command::new("mke2fs")
        .env("E2FSPROGS_FAKE_TIME", TIME.to_string())
        .args(["-q", "-F", "-t", "ext2", "-U", UUID, "-E", &extended])
        .args(arguments.split_whitespace())
        .arg(&path)
        .arg(format!("{size}k"))
        .output()
        .unwrap();
    output.status.success().then_some(Image { dir, path })
}

fn ours(arguments: &str, size: u64) -> mkfs::Result<Image> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    let layout = Layout::new(&parse(arguments), size * 1024)?;
    let mut tree = root();
    write(&Plan::new(layout, &mut tree)?, &Nothing, &path)?;
    Ok(Image { dir, path })
}

fn same_as_mke2fs(arguments: &str, size: u64) {
    let what = format!("mke2fs {arguments} {size}k");
    match (theirs(arguments, size), ours(arguments, size)) {
        (Some(theirs), Ok(ours)) => {
            let dump = |image: &Image| run("dumpe2fs", &[image.path()]).unwrap();
            assert_eq!(dump(&ours), dump(&theirs), "{what}");
            if size <= 64 << 10 {
                same_bytes(&ours, &theirs, &what);
            }
            check(&ours);
        }
        (None, Err(_)) => {}
        (theirs, ours) => {
            panic!("{what}: theirs {:?}, ours {:?}", theirs.is_some(), ours.err())
        }
    }
}

fn same_bytes(ours: &Image, theirs: &Image, what: &str) {
    let [ours, theirs] = [ours, theirs].map(|image| std::fs::read(&image.path).unwrap());
    let len = ours.len().min(theirs.len());
    assert!(theirs[len..].iter().all(|byte| *byte == 0), "{what}");
    let different = (0..len).find(|at| ours[*at] != theirs[*at]);
    if let Some(at) = different {
        let from = at & !15;
        panic!(
            "{what}: at {at:#x}\n ours   {:02x?}\n theirs {:02x?}",
            &ours[from..from + 16],
            &theirs[from..from + 16]
        );
    }
}

fn check(image: &Image) {
    let output = Command::new("e2fsck").args(["-fn", image.path()]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}");
}

#[test]
fn small_volumes_are_mke2fs_s_byte_for_byte() {
    for size in [
        20, 60, 100, 200, 360, 720, 1440, 2048, 3071, 3072, 5000, 8191, 8192, 8193, 8240, 8300,
        8545, 8550, 16384, 16386, 16750, 16800, 30000, 65536,
    ] {
        same_as_mke2fs("", size);
    }
    for (arguments, size) in [
        ("-b 1024 -N 16", 58),
        ("-b 1024 -N 16", 59),
        ("-b 1024 -N 16", 64),
        ("-b 1024 -N 12", 4096),
        ("-b 1024 -N 13", 4096),
        ("-b 2048", 10000),
        ("-b 4096", 20000),
        ("-b 8192", 30000),
        ("-b 16384", 40000),
        ("-b 32768", 50000),
        ("-b 65536", 60000),
        ("-b 4096 -I 128", 65536),
        ("-b 1024 -I 1024", 10000),
        ("-N 100", 8192),
        ("-N 16384 -I 128", 8192),
        ("-N 30000 -I 128 -b 1024", 8192),
        ("-N 65000 -I 128 -b 1024", 8192),
        ("-N 100000", 65536),
        ("-i 1024", 65536),
        ("-i 65536", 65536),
        ("-b 4096 -i 1024", 65536),
        ("-O ^resize_inode", 65536),
        ("-O ^sparse_super,^resize_inode", 65536),
        ("-O none", 8192),
        ("-O ^dir_index,^filetype", 4096),
        ("-m 0 -L sixteen_letters_", 9000),
        ("-m 12.5", 9000),
    ] {
        same_as_mke2fs(arguments, size);
    }
}

#[test]
fn large_volumes_are_laid_out_as_mke2fs_s() {
    for (arguments, kib) in [
        ("", 300 << 10),
        ("", 511 << 10),
        ("", 512 << 10),
        ("", 3 << 20),
        ("", 20 << 20),
        ("-b 1024", 1 << 20),
        ("-b 2048", 600 << 10),
        ("-b 4096", 131_076),
        ("-b 4096", 129 << 10),
        ("-b 4096", 132 << 10),
        ("-b 4096", 256 << 10),
        ("-b 4096", 263_168),
        ("-b 4096 -N 40000", 128 << 10),
        ("-b 16384 -N 300000", 4 << 20),
        ("-b 8192", 700 << 10),
    ] {
        same_as_mke2fs(arguments, kib);
    }
}

#[test]
fn what_makes_no_sense_is_said_and_nothing_panics() {
    for (arguments, size) in [
        ("-b 1000", 8192),
        ("-b 512", 8192),
        ("-I 100", 8192),
        ("-I 4096 -b 1024", 8192),
        ("-i 5", 8192),
        ("-N 4000000000", 8192),
        ("-m 60", 8192),
        ("-L more_than_sixteen_letters", 8192),
        ("-b 1024", 1 << 40),
        ("", 0),
        ("-b 65536 -I 32768", u64::MAX >> 12),
        ("-N 0", 8192),
    ] {
        let layout = Layout::new(&parse(arguments), size.saturating_mul(1024));
        assert!(layout.is_err(), "{arguments} {size}");
    }
}
