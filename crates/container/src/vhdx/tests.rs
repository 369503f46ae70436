//! Differencing images, built by hand: no available program writes them.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use draconis_device::{Disk, Extent, FileOptions, OpenedFile, Random};
use draconis_types::Block;

use super::log::{LOG_SECTOR_BYTES as LOG_SECTOR, build_entry};
use super::{
    DATA_WRITE_GUID_AT, HAS_PARENT_FLAG, HEADER_BYTES, HEADER_OFFSETS, KIB, LOG_GUID_AT, MIB,
    PARENT_LOCATOR_GUID, SB_BLOCK_PRESENT, locator, set_checksum,
};
use crate::create::{DryRunDisk, NewFormat, NewImageDisk};
use crate::image_file::le64;
use crate::{Error, UnsupportedFeature, open, open_for_writing};

const SECTOR_BYTES: u64 = 512;
/// Offset of the BAT of a new image.
const BAT_OFFSET: u64 = 3 * MIB;
const METADATA_OFFSET: u64 = 2 * MIB;
const BLOCKS_OFFSET: u64 = 8 * MIB;
/// The largest blocks have the fewest per chunk: a disk of some GiB has two bitmaps.
const BLOCK_BYTES: u64 = 256 * MIB;
const BLOCKS_PER_CHUNK: u64 = 16;

fn open_disk(file: &File, write: bool) -> Arc<dyn Disk> {
    let how = FileOptions { write, direct: false, uring: false };
    Arc::new(OpenedFile::new(file.try_clone().unwrap().into(), how).unwrap().start())
}

fn encode_locator(pairs: &[(&str, &str)]) -> Vec<u8> {
    let mut item = locator::LOCATOR_TYPE.to_vec();
    item.extend([0, 0]);
    item.extend((pairs.len() as u16).to_le_bytes());
    let mut at = 20 + 12 * pairs.len();
    let mut all = vec![];
    let utf16 =
        |text: &str| -> Vec<u8> { text.encode_utf16().flat_map(u16::to_le_bytes).collect() };
    for pair in pairs {
        let (key, value) = (utf16(pair.0), utf16(pair.1));
        item.extend((at as u32).to_le_bytes());
        item.extend(((at + key.len()) as u32).to_le_bytes());
        item.extend((key.len() as u16).to_le_bytes());
        item.extend((value.len() as u16).to_le_bytes());
        at += key.len() + value.len();
        all.extend([key, value].concat());
    }
    [item, all].concat()
}

/// Returns an image without blocks of its own, over the one with the data GUID `behind`.
fn build_image(len_bytes: u64, identity: u8, behind: Option<&[u8]>) -> File {
    let file = tempfile::tempfile().unwrap();
    file.set_len(NewFormat::Vhdx.max_file_bytes(len_bytes)).unwrap();
    let on = open_disk(&file, true);
    let draft = DryRunDisk::new(&*on, NewFormat::Vhdx, len_bytes);
    NewImageDisk::new(&*on, &draft, [identity; 16]).unwrap().finish().unwrap();
    file.set_len(BLOCKS_OFFSET).unwrap();
    let flags = if behind.is_some() { HAS_PARENT_FLAG } else { 0 };
    let parameters = [BLOCK_BYTES as u32, flags].map(u32::to_le_bytes).concat();
    file.write_all_at(&parameters, METADATA_OFFSET + 64 * KIB).unwrap();
    if let Some(locator) = behind {
        let at = 128 * KIB as u32;
        let entry =
            [&PARENT_LOCATOR_GUID[..], &at.to_le_bytes(), &(locator.len() as u32).to_le_bytes()];
        file.write_all_at(&entry.concat(), METADATA_OFFSET + 32 + 32 * 5).unwrap();
        file.write_all_at(&6u16.to_le_bytes(), METADATA_OFFSET + 10).unwrap();
        file.write_all_at(locator, METADATA_OFFSET + u64::from(at)).unwrap();
    }
    file
}

fn build_differencing_image(len_bytes: u64, identity: u8, behind: u8) -> File {
    let behind = locator::format_guid(&[behind; 16]).to_ascii_uppercase();
    let pairs = [("relative_path", r".\parent.vhdx"), ("parent_linkage", &behind)];
    build_image(len_bytes, identity, Some(&encode_locator(&pairs)))
}

/// Sets the BAT entry of a block, or of the bitmap of a chunk, which follows those of its blocks.
fn set_bat_entry(file: &File, nth: u64, entry: u64) {
    file.write_all_at(&entry.to_le_bytes(), BAT_OFFSET + 8 * nth).unwrap();
}

/// Returns the offset of the block `nth`, if it is present.
fn block_offset(nth: u64) -> u64 {
    BLOCKS_OFFSET + nth * BLOCK_BYTES
}

/// States of a layer's blocks and, for partially present ones, which of the tested sectors are its
/// own.
struct TestLayer {
    len_bytes: u64,
    blocks: Vec<(u64, Vec<u64>)>,
    byte: u8,
}

/// Returns the tested sectors of a block: its ends, and those around pages of the bitmap.
fn tested_sectors() -> Vec<u64> {
    let last = BLOCK_BYTES / SECTOR_BYTES - 1;
    vec![0, 1, 2, 4094, 4095, 4096, 4097, 8191, 8192, 300_000, last - 1, last]
}

impl TestLayer {
    fn random_layer(random: &mut Random, len_bytes: u64, byte: u8) -> Self {
        let blocks = (0..len_bytes.div_ceil(BLOCK_BYTES)).map(|_| {
            let state = [0, 2, 3, 6, 7, 7][random.next_below(6) as usize];
            (state, tested_sectors().into_iter().filter(|_| random.once_in(2)).collect())
        });
        Self { len_bytes, blocks: blocks.collect(), byte }
    }

    fn write_layer(&self, file: &File) {
        let chunks = (self.blocks.len() as u64).div_ceil(BLOCKS_PER_CHUNK);
        let bitmap = |chunk: u64| block_offset(self.blocks.len() as u64) + chunk * MIB;
        file.set_len(bitmap(chunks)).unwrap();
        let mut bits = vec![vec![0u8; MIB as usize]; chunks as usize];
        for (nth, (state, own)) in (0..).zip(&self.blocks) {
            set_bat_entry(
                file,
                nth + nth / BLOCKS_PER_CHUNK,
                if *state == 0 { 0 } else { block_offset(nth) | state },
            );
            for sector in own {
                let bit = nth % BLOCKS_PER_CHUNK * (BLOCK_BYTES / SECTOR_BYTES) + sector;
                bits[(nth / BLOCKS_PER_CHUNK) as usize][bit as usize / 8] |= 1 << (bit % 8);
            }
            // Sectors that are not its own have contents too, which must not be read.
            for sector in tested_sectors() {
                file.write_all_at(&[self.byte; 512], block_offset(nth) + sector * SECTOR_BYTES)
                    .unwrap();
            }
        }
        for (chunk, bits) in (0..).zip(bits) {
            set_bat_entry(
                file,
                chunk * (BLOCKS_PER_CHUNK + 1) + BLOCKS_PER_CHUNK,
                bitmap(chunk) | SB_BLOCK_PRESENT,
            );
            file.write_all_at(&bits, bitmap(chunk)).unwrap();
        }
    }

    /// Returns the contents of a sector over one that holds `below`.
    fn expected_sector(&self, nth: u64, below: u8) -> u8 {
        let per_block = BLOCK_BYTES / SECTOR_BYTES;
        match self.blocks.get((nth / per_block) as usize) {
            Some((0, _)) => below,
            Some((6, _)) => self.byte,
            Some((7, own)) if own.contains(&(nth % per_block)) => self.byte,
            Some((7, _)) => below,
            _ => 0,
        }
    }
}

fn read_sectors(disk: &dyn Disk, sector: u64, count: u64) -> Vec<u8> {
    let at = Extent::new(sector * SECTOR_BYTES, count * SECTOR_BYTES);
    let block = disk.read_now(at, Block::private(at.len_bytes as usize));
    block.unwrap_or_else(|refused| panic!("{sector}: {}", refused.error)).into_private().to_vec()
}

#[test]
fn differencing_vhdx_reads_parent() {
    let gib = 1 << 30;
    let mut random = Random::new(17);
    for _ in 0..3 {
        // The top one is longer than those below.
        let base = TestLayer::random_layer(&mut random, 4 * gib, 1);
        let base =
            TestLayer { blocks: base.blocks.into_iter().map(|_| (6, vec![])).collect(), ..base };
        let middle = TestLayer::random_layer(&mut random, 5 * gib, 2);
        let top = TestLayer::random_layer(&mut random, 5 * gib + 6 * SECTOR_BYTES, 3);
        let files = [
            build_image(base.len_bytes, 21, None),
            build_differencing_image(middle.len_bytes, 22, 21),
            build_differencing_image(top.len_bytes, 23, 22),
        ];
        for (layer, file) in [&base, &middle, &top].into_iter().zip(&files) {
            layer.write_layer(file);
        }
        let [base_disk, middle_disk, top_disk] =
            files.each_ref().map(|file| open_disk(file, false));
        let behind = [middle_disk, base_disk.clone()];
        let opened = open(top_disk.clone(), &behind).unwrap().disk;
        assert_eq!(opened.properties().len_bytes, top.len_bytes);
        let last = top.len_bytes / SECTOR_BYTES;
        let firsts = (0..top.blocks.len() as u64).map(|nth| nth * (BLOCK_BYTES / SECTOR_BYTES));
        for sector in
            firsts.flat_map(|first| tested_sectors().into_iter().map(move |nth| first + nth))
        {
            if sector >= last {
                continue;
            }
            let of_base = if sector < base.len_bytes / SECTOR_BYTES {
                base.expected_sector(sector, 0)
            } else {
                0
            };
            let of_middle = match sector < middle.len_bytes / SECTOR_BYTES {
                true => middle.expected_sector(sector, of_base),
                false => 0,
            };
            let expected = top.expected_sector(sector, of_middle);
            assert_eq!(read_sectors(&*opened, sector, 1), [expected; 512], "{sector}");
            // Together with its neighbour, which may come from another layer.
            if sector % 4096 == 4095 || sector % 4096 == 0 {
                assert_eq!(read_sectors(&*opened, sector, 2)[..512], [expected; 512], "{sector}");
            }
        }
        // Writing is refused, and names are as the images have them.
        let refused = open_for_writing(open_disk(&files[2], true), &behind, 7).err().unwrap();
        assert!(refused.to_string().contains("is only read"), "{refused}");
        let missing = open(top_disk.clone(), &behind[..1]).err().unwrap();
        let name = r".\parent.vhdx".to_owned();
        assert_eq!(missing, Error::Unsupported(UnsupportedFeature::NeedsBacking(name.clone())));
        for wrong in [base_disk, top_disk.clone()] {
            let refused = open(top_disk.clone(), &[wrong, behind[1].clone()]).err().unwrap();
            let Error::Unsupported(UnsupportedFeature::WrongBacking { name: of, wanted, .. }) =
                &refused
            else {
                panic!("{refused}");
            };
            assert_eq!((of, wanted), (&name, &locator::format_guid(&[22; 16])));
        }
    }
}

#[test]
fn bitmaps_in_the_log_are_replayed() {
    let base = build_image(BLOCK_BYTES, 31, None);
    set_bat_entry(&base, 0, block_offset(0) | 6);
    base.set_len(block_offset(1)).unwrap();
    base.write_all_at(&[1; 1024], block_offset(0)).unwrap();
    let child = build_differencing_image(BLOCK_BYTES, 32, 31);
    set_bat_entry(&child, 0, block_offset(0) | 7);
    set_bat_entry(&child, BLOCKS_PER_CHUNK, block_offset(1) | SB_BLOCK_PRESENT);
    child.set_len(block_offset(1) + MIB).unwrap();
    child.write_all_at(&[2; 1024], block_offset(0)).unwrap();
    let behind = [open_disk(&base, false)];
    let sector = |nth| {
        let opened = open(open_disk(&child, false), &behind).unwrap().disk;
        read_sectors(&*opened, nth, 1)[0]
    };
    assert_eq!([sector(0), sector(1)], [1, 1]);
    // Not closed cleanly: only the log marks the second sector as its own.
    let id = [9; 16];
    let mut bits = vec![0; LOG_SECTOR];
    bits[0] = 2;
    let entry = build_entry(&id, 1, 0, block_offset(1) + MIB, &[(block_offset(1), bits)]);
    child.write_all_at(&entry, MIB).unwrap();
    for at in HEADER_OFFSETS {
        let mut header = vec![0; HEADER_BYTES];
        child.read_exact_at(&mut header, at).unwrap();
        header[LOG_GUID_AT..LOG_GUID_AT + 16].copy_from_slice(&id);
        set_checksum(&mut header);
        child.write_all_at(&header, at).unwrap();
    }
    assert_eq!([sector(0), sector(1)], [1, 2]);
}

#[test]
fn parent_linkage2_is_accepted() {
    let base = build_image(BLOCK_BYTES, 41, None);
    let [other, right] = [40, 41].map(|id| locator::format_guid(&[id; 16]));
    let pairs =
        [("parent_linkage", &other[..]), ("parent_linkage2", &right), ("volume_path", "parent")];
    let child = build_image(BLOCK_BYTES, 42, Some(&encode_locator(&pairs)));
    open(open_disk(&child, false), &[open_disk(&base, false)]).unwrap();
    // Its contents were changed: they have another data GUID.
    let mut header = vec![0; HEADER_BYTES];
    base.read_exact_at(&mut header, HEADER_OFFSETS[1]).unwrap();
    let newer = le64(&header, 8) + 1;
    header[8..16].copy_from_slice(&newer.to_le_bytes());
    header[DATA_WRITE_GUID_AT..DATA_WRITE_GUID_AT + 16].fill(43);
    set_checksum(&mut header);
    base.write_all_at(&header, HEADER_OFFSETS[0]).unwrap();
    let refused = open(open_disk(&child, false), &[open_disk(&base, false)]).err().unwrap();
    assert!(
        matches!(refused, Error::Unsupported(UnsupportedFeature::WrongBacking { .. })),
        "{refused}"
    );
}

#[test]
fn invalid_locators_and_bitmaps_are_refused() {
    let right = locator::format_guid(&[51; 16]);
    let good = encode_locator(&[("parent_linkage", &right)]);
    let bad: [Vec<u8>; 6] = [
        vec![],
        encode_locator(&[]),
        encode_locator(&[("relative_path", "parent")]),
        encode_locator(&[("parent_linkage", "{}")]),
        encode_locator(&[("parent_linkage", &right.replace('3', "\u{1b}"))]),
        good[..40].to_vec(),
    ];
    for (nth, locator) in bad.iter().enumerate() {
        let image = build_image(BLOCK_BYTES, 50, Some(locator));
        let refused = open(open_disk(&image, false), &[]).err().unwrap();
        assert!(refused.to_string().contains("VHDX"), "{nth}: {refused}");
    }
    // One with an impossible length, and one past the end.
    for (field, value) in [(20u64, u32::MAX), (16, 0xFFFF_FF00)] {
        let image = build_image(BLOCK_BYTES, 50, Some(&good));
        image.write_all_at(&value.to_le_bytes(), METADATA_OFFSET + 32 + 32 * 5 + field).unwrap();
        assert!(open(open_disk(&image, false), &[]).is_err());
    }
    // A partially present block without its bitmap.
    let base = build_image(BLOCK_BYTES, 51, None);
    let child = build_image(BLOCK_BYTES, 50, Some(&good));
    set_bat_entry(&child, 0, block_offset(0) | 7);
    let opened = open(open_disk(&child, false), &[open_disk(&base, false)]).unwrap().disk;
    assert!(opened.read_now(Extent::new(0, 512), Block::private(512)).is_err());
    // Without a parent no block is partially present.
    set_bat_entry(&base, 0, block_offset(0) | 7);
    let opened = open(open_disk(&base, false), &[]).unwrap().disk;
    assert!(opened.read_now(Extent::new(0, 512), Block::private(512)).is_err());
}
