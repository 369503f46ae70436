//! Differencing VHD images, built by hand since no available program writes them, and differencing
//! VMDK images from qemu-img.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use draconis_device::{Extent, Random};
use draconis_types::Block;

use crate::tests::{convert_with_qemu_img, memory_disk, read_all, sample_contents};
use crate::{Error, UnsupportedFeature, open};

const SECTOR_BYTES: usize = 512;

fn write_bytes_at(bytes: &mut [u8], at: usize, what: &[u8]) {
    bytes[at..at + what.len()].copy_from_slice(what);
}

fn set_checksum(bytes: &mut [u8], at: usize) {
    bytes[at..at + 4].fill(0);
    let sum = bytes.iter().fold(0u32, |sum, byte| sum.wrapping_add(u32::from(*byte)));
    write_bytes_at(bytes, at, &(!sum).to_be_bytes());
}

fn vhd_footer(kind: u32, len: usize, identity: u8, header_at: u64) -> Vec<u8> {
    let mut footer = vec![0; 512];
    write_bytes_at(&mut footer, 0, b"conectix");
    write_bytes_at(&mut footer, 8, &2u32.to_be_bytes());
    write_bytes_at(&mut footer, 12, &0x10000u32.to_be_bytes());
    write_bytes_at(&mut footer, 16, &header_at.to_be_bytes());
    write_bytes_at(&mut footer, 40, &(len as u64).to_be_bytes());
    write_bytes_at(&mut footer, 48, &(len as u64).to_be_bytes());
    write_bytes_at(&mut footer, 60, &kind.to_be_bytes());
    write_bytes_at(&mut footer, 68, &[identity; 16]);
    set_checksum(&mut footer, 64);
    footer
}

fn fixed_vhd(disk: &[u8], identity: u8) -> Vec<u8> {
    [disk, &vhd_footer(2, disk.len(), identity, u64::MAX)].concat()
}

/// Builds a VHD from blocks with their own sectors, over the one with the identity `behind`.
fn differencing_vhd(
    blocks: &[Option<Vec<Option<u8>>>],
    block_bytes: usize,
    len: usize,
    identity: u8,
    behind: Option<u8>,
) -> Vec<u8> {
    let footer = vhd_footer(if behind.is_some() { 4 } else { 3 }, len, identity, 512);
    let mut header = vec![0; 1024];
    write_bytes_at(&mut header, 0, b"cxsparse");
    write_bytes_at(&mut header, 8, &[0xFF; 8]);
    write_bytes_at(&mut header, 16, &1536u64.to_be_bytes());
    write_bytes_at(&mut header, 24, &0x10000u32.to_be_bytes());
    write_bytes_at(&mut header, 28, &(blocks.len() as u32).to_be_bytes());
    write_bytes_at(&mut header, 32, &(block_bytes as u32).to_be_bytes());
    write_bytes_at(&mut header, 40, &[behind.unwrap_or(0); 16]);
    let name: Vec<u8> = "päront.vhd".encode_utf16().flat_map(u16::to_be_bytes).collect();
    write_bytes_at(&mut header, 64, &name);
    set_checksum(&mut header, 36);
    let mut image = [footer.clone(), header].concat();
    let table_at = image.len();
    image.resize((table_at + 4 * blocks.len()).next_multiple_of(SECTOR_BYTES), 0xFF);
    for (nth, block) in blocks.iter().enumerate() {
        let Some(sectors) = block else { continue };
        let sector = (image.len() / SECTOR_BYTES) as u32;
        write_bytes_at(&mut image, table_at + 4 * nth, &sector.to_be_bytes());
        let mut bitmap = vec![0; (sectors.len() / 8).max(1).next_multiple_of(SECTOR_BYTES)];
        for (nth, _) in sectors.iter().enumerate().filter(|(_, own)| own.is_some()) {
            bitmap[nth / 8] |= 0x80 >> (nth % 8);
        }
        image.extend(bitmap);
        // Sectors without contents of their own hold arbitrary bytes.
        image.extend(sectors.iter().flat_map(|own| [own.unwrap_or(0xEE); SECTOR_BYTES]));
    }
    [image, footer].concat()
}

/// Returns random blocks, some absent, with some of their sectors present.
fn random_blocks(
    random: &mut Random,
    len: usize,
    block_bytes: usize,
) -> Vec<Option<Vec<Option<u8>>>> {
    let sector = |random: &mut Random| (!random.once_in(3)).then(|| random.next_below(256) as u8);
    let block = |random: &mut Random| -> Vec<Option<u8>> {
        (0..block_bytes / SECTOR_BYTES).map(|_| sector(random)).collect()
    };
    let count = len.div_ceil(block_bytes);
    (0..count).map(|_| (!random.once_in(3)).then(|| block(random))).collect()
}

/// Returns the disk that the blocks form over `below`.
fn overlay_blocks(
    blocks: &[Option<Vec<Option<u8>>>],
    block_bytes: usize,
    len: usize,
    below: &[u8],
) -> Vec<u8> {
    let mut disk = below.to_vec();
    disk.resize(len, 0);
    for (at, own) in blocks.iter().enumerate().flat_map(|(nth, block)| {
        let sectors = block.iter().flatten().enumerate();
        sectors.map(move |(sector, own)| (nth * block_bytes + sector * SECTOR_BYTES, own))
    }) {
        if let (Some(byte), true) = (own, at < len) {
            disk[at..at + SECTOR_BYTES].fill(*byte);
        }
    }
    disk
}

#[test]
fn differencing_vhd_reads_parent() {
    let mut random = Random::new(11);
    // A bitmap that is shorter than a sector, and one of two sectors.
    for block_bytes in [64 << 10, 4 << 20] {
        let raw = sample_contents(9 << 20);
        let (len, longer) = (9 << 20, (11 << 20) + 3 * SECTOR_BYTES);
        let nothing = random_blocks(&mut random, len, block_bytes);
        let dynamic = differencing_vhd(&nothing, block_bytes, len, 1, None);
        let of_dynamic = overlay_blocks(&nothing, block_bytes, len, &vec![0; len]);
        for (parent, below) in [(fixed_vhd(&raw, 1), raw), (dynamic, of_dynamic)] {
            let middle = random_blocks(&mut random, len, block_bytes);
            let in_middle = overlay_blocks(&middle, block_bytes, len, &below);
            let middle = differencing_vhd(&middle, block_bytes, len, 2, Some(1));
            let top = random_blocks(&mut random, longer, block_bytes);
            let expected = overlay_blocks(&top, block_bytes, longer, &in_middle);
            let top = differencing_vhd(&top, block_bytes, longer, 3, Some(2));
            let files = [memory_disk(middle.clone()), memory_disk(parent.clone())];
            let opened = open(memory_disk(top.clone()), &files).unwrap();
            assert!(opened.disk.properties().read_only);
            assert!(read_all(&*opened.disk).unwrap() == expected);
            // Each lacks the next.
            for given in [&files[..0], &files[..1]] {
                let missing = open(memory_disk(top.clone()), given).map(drop).unwrap_err();
                let name = "päront.vhd".to_owned();
                assert_eq!(missing, Error::Unsupported(UnsupportedFeature::NeedsBacking(name)));
            }
            // Given in another order, twice, or the image itself.
            let others =
                [memory_disk(parent.clone()), memory_disk(top.clone()), memory_disk(vec![7; 4096])];
            for wrong in others {
                let error = open(memory_disk(top.clone()), &[wrong, files[1].clone()]).map(drop);
                let error = error.unwrap_err();
                assert!(
                    matches!(&error, Error::Unsupported(UnsupportedFeature::WrongBacking { wanted, .. })
                        if *wanted == "02".repeat(16)),
                    "{error}"
                );
            }
        }
    }
}

fn run_command(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Creates an image over another one, with some writes of its own.
fn differencing_vmdk(dir: &Path, name: &str, below: &str, writes: &[&str]) {
    let (image, below) = (dir.join(name), dir.join(below));
    let (image, below) = (image.to_str().unwrap(), below.to_str().unwrap());
    run_command("qemu-img", &["create", "-q", "-f", "vmdk", "-b", below, "-F", "vmdk", image]);
    let writes = writes.iter().flat_map(|write| ["-c", write]);
    run_command("qemu-io", &[&["-f", "vmdk"], &writes.collect::<Vec<_>>()[..], &[image]].concat());
}

#[test]
#[ignore = "tools: qemu-img"]
fn differencing_vmdk_reads_parent() {
    let dir = tempfile::tempdir().unwrap();
    let raw = sample_contents(9 << 20);
    for more in [&[][..], &["-o", "subformat=streamOptimized"]] {
        let arguments = [&["-O", "vmdk"], more].concat();
        let Some(parent) = convert_with_qemu_img(dir.path(), &raw, &arguments) else { return };
        let parent_path = dir.path().join("parent");
        std::fs::write(&parent_path, &parent).unwrap();
        differencing_vmdk(
            dir.path(),
            "middle",
            "parent",
            &["write -P 7 1M 100k", "write -P 8 8M 64k"],
        );
        differencing_vmdk(
            dir.path(),
            "top",
            "middle",
            &["write -P 9 1088k 64k", "write -z 2M 128k"],
        );
        let mut expected = raw.clone();
        let mut fill = |from: usize, len: usize, byte| expected[from..from + len].fill(byte);
        fill(1 << 20, 100 << 10, 7);
        fill(8 << 20, 64 << 10, 8);
        fill(1088 << 10, 64 << 10, 9);
        fill(2 << 20, 128 << 10, 0);
        let read = |name: &str| memory_disk(std::fs::read(dir.path().join(name)).unwrap());
        let opened = open(read("top"), &[read("middle"), read("parent")]).unwrap();
        assert!(opened.disk.properties().read_only);
        assert!(read_all(&*opened.disk).unwrap() == expected, "{more:?}");
        let missing = open(read("middle"), &[]).map(drop).unwrap_err();
        let name = parent_path.to_str().unwrap().to_owned();
        assert_eq!(missing, Error::Unsupported(UnsupportedFeature::NeedsBacking(name)));
        // No image of the same kind, another image, and one that was changed since.
        let other = convert_with_qemu_img(dir.path(), &raw, &["-O", "vmdk"]).unwrap();
        let changed = {
            let mut parent = parent;
            let at = parent.windows(5).position(|it| it == b"\nCID=").unwrap() + 5;
            let byte = if parent[at] == b'1' { b'2' } else { b'1' };
            parent[at] = byte;
            parent
        };
        for wrong in [raw.clone(), other, changed] {
            let error = open(read("middle"), &[memory_disk(wrong)]).map(drop).unwrap_err();
            let is_refused =
                matches!(&error, Error::Unsupported(UnsupportedFeature::WrongBacking { .. }));
            assert!(is_refused, "{error}");
            assert!(error.to_string().contains(parent_path.to_str().unwrap()), "{error}");
        }
    }
}

/// A raw backing file is never opened by its contents: a guest could name any file in it.
#[test]
#[ignore = "tools: qemu-img"]
fn raw_backing_file_is_not_probed() {
    let dir = tempfile::tempdir().unwrap();
    let raw = sample_contents(1 << 20);
    let Some(below) = convert_with_qemu_img(dir.path(), &raw, &["-O", "qcow2"]) else { return };
    let path = |name: &str| dir.path().join(name).into_os_string().into_string().unwrap();
    std::fs::write(path("below"), &below).unwrap();
    let mut as_raw = below.clone();
    as_raw.resize(below.len().next_multiple_of(512), 0);
    for compat in ["compat=0.10", "compat=1.1"] {
        for (format, expected) in [("raw", &as_raw), ("qcow2", &raw)] {
            let (length, top) = (expected.len().to_string(), path("top"));
            let arguments = ["create", "-q", "-f", "qcow2", "-o", compat, "-F", format, "-b"];
            run_command("qemu-img", &[&arguments[..], &[&path("below"), &top, &length]].concat());
            let top = memory_disk(std::fs::read(top).unwrap());
            let opened = open(top, &[memory_disk(below.clone())]).unwrap();
            assert!(read_all(&*opened.disk).unwrap() == *expected, "{compat}, {format}");
        }
    }
}

/// An image with any damage, over itself: an error or another disk.
#[test]
fn corrupt_differencing_image_does_not_panic() {
    let mut random = Random::new(5);
    let blocks = random_blocks(&mut random, 1 << 20, 64 << 10);
    let image = differencing_vhd(&blocks, 64 << 10, 1 << 20, 1, Some(1));
    let parent = memory_disk(fixed_vhd(&sample_contents(1 << 20), 1));
    let (mut opened, mut refused) = (0, 0);
    for _ in 0..2000 {
        let mut broken = image.clone();
        let at = random.next_below(2048) as usize;
        broken[at] = random.next_below(256) as u8;
        // With valid checksums, as an attacker would write them.
        set_checksum(&mut broken[..512], 64);
        set_checksum(&mut broken[512..1536], 36);
        let files = [memory_disk(broken.clone()), Arc::clone(&parent)];
        match open(memory_disk(broken), &files) {
            Ok(it) => {
                let sectors = it.disk.properties().len_bytes / 512;
                for at in [0, 1, sectors / 2, sectors.saturating_sub(9)] {
                    let _ = it.disk.read_now(Extent::new(at * 512, 4096), Block::private(4096));
                }
                opened += 1;
            }
            Err(_) => refused += 1,
        }
    }
    assert!(opened > 100 && refused > 20, "{opened}, {refused}");
}
