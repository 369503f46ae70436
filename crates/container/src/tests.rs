//! Images written by qemu-img, and damaged images.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use draconis_device::{Disk, Extent, Group, MemoryDisk, Random, Write};
use draconis_types::Block;

use crate::{Error, Format, UnsupportedFeature, open, open_for_writing};

pub(crate) fn memory_disk(mut bytes: Vec<u8>) -> Arc<dyn Disk> {
    bytes.resize(bytes.len().next_multiple_of(512), 0);
    Arc::new(MemoryDisk::new(bytes, 512))
}

pub(crate) fn read_all(disk: &dyn Disk) -> Result<Vec<u8>, draconis_device::Error> {
    let len = disk.properties().len_bytes;
    // Not in whole clusters.
    let mut bytes = vec![];
    while (bytes.len() as u64) < len {
        let step = (len - bytes.len() as u64).min(37 * 512);
        let at = Extent::new(bytes.len() as u64, step);
        let block = disk.read_now(at, Block::private(step as usize));
        bytes.extend(block.map_err(|refused| refused.error)?.into_private().iter());
    }
    Ok(bytes)
}

/// Returns a disk with zeros, patterns and noise in pieces of many lengths.
pub(crate) fn sample_contents(len: usize) -> Vec<u8> {
    let mut random = Random::new(9);
    let mut bytes = vec![];
    while bytes.len() < len {
        let piece = 512 * (1 + random.next_below(600)) as usize;
        match random.next_below(3) {
            0 => bytes.resize(bytes.len() + piece, 0),
            1 => bytes.extend(b"abcdefgh".repeat(piece / 8)),
            _ => {
                let mut noise = vec![0; piece];
                random.fill(&mut noise);
                bytes.extend(noise);
            }
        }
    }
    bytes.truncate(len);
    bytes
}

/// Converts a raw image; prints a note and returns `None` if qemu-img is missing.
pub(crate) fn convert_with_qemu_img(dir: &Path, raw: &[u8], arguments: &[&str]) -> Option<Vec<u8>> {
    let (from, to) = (dir.join("raw"), dir.join("made"));
    std::fs::write(&from, raw).unwrap();
    let mut command = Command::new("qemu-img");
    command.args(["convert", "-f", "raw"]).args(arguments).arg(&from).arg(&to);
    let Ok(output) = command.output() else {
        draconis_testkit::report_skipped("images of other programs need qemu-img");
        return None;
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(std::fs::read(to).unwrap())
}

const CONVERTED_FORMATS: &[(&[&str], Option<Format>)] = &[
    (&["-O", "qcow2"], Some(Format::Qcow2)),
    (&["-O", "qcow2", "-c"], Some(Format::Qcow2)),
    (&["-O", "qcow2", "-c", "-o", "compression_type=zstd"], Some(Format::Qcow2)),
    (&["-O", "qcow2", "-o", "cluster_size=512"], Some(Format::Qcow2)),
    (&["-O", "qcow2", "-o", "cluster_size=2M,compat=0.10"], Some(Format::Qcow2)),
    (&["-O", "qcow2", "-o", "extended_l2=on,cluster_size=16k"], Some(Format::Qcow2)),
    (&["-O", "qcow2", "-o", "extended_l2=on,cluster_size=2M"], Some(Format::Qcow2)),
    (&["-O", "qcow2", "-c", "-o", "extended_l2=on"], Some(Format::Qcow2)),
    (&["-O", "vpc", "-o", "force_size=on"], Some(Format::Vhd)),
    (&["-O", "vpc", "-o", "force_size=on,subformat=fixed"], None),
    (&["-O", "vhdx"], Some(Format::Vhdx)),
    (&["-O", "vhdx", "-o", "subformat=fixed,block_size=1M"], Some(Format::Vhdx)),
    (&["-O", "vmdk"], Some(Format::Vmdk)),
    (&["-O", "vmdk", "-o", "subformat=streamOptimized"], Some(Format::Vmdk)),
];

#[test]
#[ignore = "tools: qemu-img"]
fn qemu_img_images_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let raw = sample_contents(9 << 20);
    for (arguments, format) in CONVERTED_FORMATS {
        let Some(bytes) = convert_with_qemu_img(dir.path(), &raw, arguments) else { return };
        let opened = open(memory_disk(bytes), &[]).unwrap_or_else(|e| panic!("{arguments:?}: {e}"));
        assert_eq!(opened.format, *format);
        let found = read_all(&*opened.disk).unwrap();
        assert!(found == raw, "{arguments:?}: {} bytes", found.len());
    }
}

#[test]
#[ignore = "tools: qemu-img"]
fn differencing_image_needs_parent() {
    let dir = tempfile::tempdir().unwrap();
    let raw = sample_contents(3 << 20);
    let Some(base) = convert_with_qemu_img(dir.path(), &raw, &["-O", "qcow2"]) else { return };
    for (format, base) in [("qcow2", base), ("raw", raw.clone())] {
        let below = dir.path().join("below");
        std::fs::write(&below, &base).unwrap();
        let over = dir.path().join("over");
        let qemu = |program: &str, arguments: &[&str]| {
            let output = Command::new(program).args(arguments).output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        };
        let (below_text, over_text) = (below.to_str().unwrap(), over.to_str().unwrap());
        qemu(
            "qemu-img",
            &["create", "-f", "qcow2", "-b", below_text, "-F", format, over_text, "4M"],
        );
        qemu("qemu-io", &["-c", "write -P 7 1M 100k", "-c", "write -z 2M 64k", over_text]);
        let over = memory_disk(std::fs::read(&over).unwrap());
        let error = open(over.clone(), &[]).err().unwrap();
        let name = below.to_str().unwrap().to_owned();
        assert_eq!(error, Error::Unsupported(UnsupportedFeature::NeedsBacking(name)));
        let mut expected = raw.clone();
        expected.resize(4 << 20, 0);
        expected[1 << 20..(1 << 20) + (100 << 10)].fill(7);
        expected[2 << 20..(2 << 20) + (64 << 10)].fill(0);
        let opened = open(over, &[memory_disk(base)]).unwrap();
        assert!(read_all(&*opened.disk).unwrap() == expected, "{format}");
    }
}

/// A part of a cluster that an L2 entry says is there, without a cluster.
#[test]
#[ignore = "tools: qemu-img"]
fn subcluster_without_cluster_is_damage() {
    let dir = tempfile::tempdir().unwrap();
    let options = ["-O", "qcow2", "-o", "extended_l2=on,cluster_size=16k"];
    let Some(mut image) = convert_with_qemu_img(dir.path(), &[9; 1 << 20], &options) else {
        return;
    };
    let number = |bytes: &[u8], at: usize| {
        u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap()) & 0x00FF_FFFF_FFFF_FE00
    };
    let entry = number(&image, number(&image, 40) as usize) as usize;
    image[entry..entry + 8].fill(0);
    assert!(read_all(&*open(memory_disk(image), &[]).unwrap().disk).is_err());
}

/// Builds an Android image: 4 KiB blocks with noise, a pattern, and no contents.
fn build_android_image() -> (Vec<u8>, Vec<u8>) {
    let noise = sample_contents(8192);
    let mut image = vec![0x3A, 0xFF, 0x26, 0xED, 1, 0, 0, 0, 28, 0, 12, 0];
    for word in [4096u32, 6, 4, 0] {
        image.extend(word.to_le_bytes());
    }
    let mut chunk = |kind: u16, blocks: u32, data: &[u8]| {
        image.extend(kind.to_le_bytes());
        image.extend([0, 0]);
        image.extend(blocks.to_le_bytes());
        image.extend((12 + data.len() as u32).to_le_bytes());
        image.extend(data);
    };
    chunk(0xCAC1, 2, &noise);
    chunk(0xCAC2, 1, b"abcd");
    chunk(0xCAC3, 3, b"");
    chunk(0xCAC4, 0, &[1, 2, 3, 4]);
    let disk = [&noise[..], &b"abcd".repeat(1024), &[0; 3 * 4096]].concat();
    (image, disk)
}

#[test]
fn android_images_are_read() {
    let (image, disk) = build_android_image();
    let opened = open(memory_disk(image), &[]).unwrap();
    assert_eq!(opened.format, Some(Format::Android));
    assert!(read_all(&*opened.disk).unwrap() == disk);
}

#[test]
fn raw_file_is_opened_as_raw() {
    let bytes = sample_contents(1 << 16);
    let opened = open(memory_disk(bytes.clone()), &[]).unwrap();
    assert_eq!((opened.format, read_all(&*opened.disk).unwrap() == bytes), (None, true));
    assert_eq!(open(memory_disk(vec![]), &[]).unwrap().format, None);
    for head in
        [&b"QFI\xFB\0\0\0\x03"[..], b"vhdxfile", b"KDMV\x01", b"conectix", b"\x3A\xFF\x26\xED\x01"]
    {
        assert!(open(memory_disk(head.to_vec()), &[]).is_err(), "{head:?}");
    }
}

#[test]
fn overflowing_vmdk_grain_is_error() {
    let mut header = vec![0; 4096];
    header[..8].copy_from_slice(b"KDMV\x01\0\0\0");
    header[12] = 1;
    header[44..46].copy_from_slice(&512u16.to_le_bytes());
    for bit in [2, 13, 54, 55, 63] {
        header[20..28].copy_from_slice(&(1u64 << bit).to_le_bytes());
        let error = open(memory_disk(header.clone()), &[]).map(drop).unwrap_err();
        assert_eq!(error.to_string(), "damaged: VMDK: grains of an impossible size", "2^{bit}");
    }
}

/// An image with any damage is an error or another disk: no panic, no endless loop, little memory.
#[test]
#[ignore = "tools: qemu-img"]
fn corrupt_image_does_not_panic() {
    let dir = tempfile::tempdir().unwrap();
    let raw = sample_contents(1 << 20);
    let made = CONVERTED_FORMATS
        .iter()
        .filter_map(|(arguments, _)| convert_with_qemu_img(dir.path(), &raw, arguments));
    let mut random = Random::new(3);
    for image in made.chain([build_android_image().0]).collect::<Vec<_>>() {
        // Headers and tables are at the start, and before the payload blocks.
        for round in 0..400 {
            let mut broken = image.clone();
            for _ in 0..=random.next_below(3) {
                let within = if round % 2 == 0 { 1024 } else { broken.len() as u64 };
                let at = random.next_below(within.min(broken.len() as u64)) as usize;
                let len = 1 + random.next_below(8) as usize;
                let end = (at + len).min(broken.len());
                let kind = random.next_below(3);
                for byte in &mut broken[at..end] {
                    *byte = [0, 0xFF, random.next_below(256) as u8][kind as usize];
                }
            }
            if round % 7 == 0 {
                broken.truncate(random.next_below(broken.len() as u64) as usize);
            }
            if let Ok(opened) = open_for_writing(memory_disk(broken.clone()), &[], 7) {
                let last = (opened.disk.properties().len_bytes / 512).saturating_sub(1);
                for nth in [0, random.next_below(2048).min(last), last / 2, last] {
                    let block = Block::private(512);
                    let group = Group { writes: vec![Write { at_bytes: nth * 512, block }] };
                    let Ok(ticket) = opened.disk.submit(group, &[]) else { break };
                    let _ = opened.disk.wait_durable(ticket);
                }
            }
            if let Ok(opened) = open(memory_disk(broken), &[]) {
                let len = opened.disk.properties().len_bytes;
                for _ in 0..20 {
                    let at = random.next_below(len.min(4 << 20) / 512 + 1) * 512;
                    let _ = opened.disk.read_now(Extent::new(at, 4096), Block::private(4096));
                }
                if let Some(last) = (len / 512).checked_sub(8) {
                    let _ =
                        opened.disk.read_now(Extent::new(last * 512, 4096), Block::private(4096));
                }
            }
        }
    }
}
